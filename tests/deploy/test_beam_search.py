"""Beam search finds what it promises: by hand-made numbers, and on a tiny random model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.offline.beam_search import BeamSearchParams, search
from shoal import LLM
from workers.engine.errors import InvalidRequest

EOS = 0


def expand_by(table: dict[tuple[int, ...], dict[int, float]]):
    """Next tokens by what was said after the prompt [9]."""

    def expand(sequences: Sequence[list[int]], num_candidates: int) -> list[dict[int, float]]:
        found = [{token: math.log(p) for token, p in table[tuple(one[1:])].items()} for one in sequences]
        return [dict(sorted(one.items(), key=lambda item: -item[1])[:num_candidates]) for one in found]

    return expand


TABLE = {
    (): {1: 0.6, 2: 0.4},
    (1,): {3: 0.5, 4: 0.5},
    (2,): {3: 0.95, EOS: 0.05},
    (1, 3): {EOS: 1.0},
    (1, 4): {EOS: 1.0},
    (2, 3): {EOS: 1.0},
}


def test_a_wider_beam_finds_what_a_greedy_search_misses() -> None:
    narrow = search([[9]], BeamSearchParams(beam_width=1, max_tokens=2), frozenset({EOS}), expand_by(TABLE))
    wide = search([[9]], BeamSearchParams(beam_width=2, max_tokens=2), frozenset({EOS}), expand_by(TABLE))

    assert narrow[0][0].tokens[1] == 1
    assert wide[0][0].tokens == [9, 2, 3]
    assert wide[0][0].cum_logprob == pytest.approx(math.log(0.4 * 0.95))


def test_a_sequence_that_ends_is_kept_and_its_place_goes_to_others() -> None:
    found = search([[9]], BeamSearchParams(beam_width=2, max_tokens=3), frozenset({EOS}), expand_by(TABLE))[0]

    assert [(one.tokens, one.finish_reason) for one in found] == [
        ([9, 2, 3, EOS], "stop"),
        ([9, 1, 3, EOS], "stop"),
    ]


def test_a_length_penalty_favours_long_or_short() -> None:
    table = {(): {EOS: 0.5, 1: 0.5}, (1,): {2: 0.55, 3: 0.45}}

    def first(length_penalty: float) -> list[int]:
        params = BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=length_penalty)
        return search([[9]], params, frozenset({EOS}), expand_by(table))[0][0].tokens

    assert first(0.0) == [9, EOS]
    assert first(3.0) == [9, 1, 2]


@pytest.mark.parametrize(("width", "tokens"), [(0, 1), (51, 1), (2, 0)])
def test_wrong_numbers_are_refused(width: int, tokens: int) -> None:
    with pytest.raises(InvalidRequest):
        BeamSearchParams(beam_width=width, max_tokens=tokens)


def test_on_a_model_the_best_pair_of_all_is_found(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    prompts = [[3, 5, 7], [11] * 18]

    def logprob(prompt: list[int], pair: Any) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *pair]])).logits[0].log_softmax(-1)
        return float(sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(pair)))

    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, cpu_threads=1, num_gpu_blocks_override=64, max_model_len=64
    )
    try:
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=12, max_tokens=2))
    finally:
        llm.close()

    for prompt, output in zip(prompts, found, strict=True):
        best = max(itertools.product(range(24), repeat=2), key=lambda pair: logprob(prompt, pair))
        assert output.sequences[0].tokens == [*prompt, *best]
        assert output.sequences[0].cum_logprob == pytest.approx(logprob(prompt, best), abs=1e-4)
        assert len(output.sequences) == 12
