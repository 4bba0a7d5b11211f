"""Beam search on a tiny random model finds the best of all, on one rank and on two."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.offline.beam_search import BeamSearchParams
from shoal import LLM, SamplingParams
from workers.engine.beam_search import BeamSearch
from workers.engine.errors import InvalidRequest, UserError
from workers.engine.request import BeamParams


@pytest.mark.parametrize(("width", "tokens"), [(0, 1), (51, 1), (2, 0)])
def test_wrong_numbers_are_refused(width: int, tokens: int) -> None:
    with pytest.raises(InvalidRequest):
        BeamSearchParams(beam_width=width, max_tokens=tokens)


@pytest.fixture(name="tiny", scope="module")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path, model


def make_llm(path: Path, **fields: Any) -> LLM:
    settings = {"cpu_threads": 1, "num_gpu_blocks_override": 64, "max_model_len": 64, **fields}
    return LLM(str(path), skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_on_a_model_the_best_pair_of_all_is_found(tiny: tuple[Path, Any], num_ranks: int) -> None:
    path, model = tiny
    prompts = [[3, 5, 7], [11] * 18]

    def logprob(prompt: list[int], pair: Any) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *pair]])).logits[0].log_softmax(-1)
        return float(sum(logits[len(prompt) - 1 + i, token] for i, token in enumerate(pair)))

    llm = make_llm(path, tensor_parallel_size=num_ranks)
    try:
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=12, max_tokens=2))
    finally:
        llm.close()

    for prompt, output in zip(prompts, found, strict=True):
        best = max(itertools.product(range(24), repeat=2), key=lambda pair: logprob(prompt, pair))
        assert output.sequences[0].tokens == [*prompt, *best]
        assert output.sequences[0].cum_logprob == pytest.approx(logprob(prompt, best), abs=1e-4)
        assert len(output.sequences) == 12


def test_sequences_are_as_likely_as_said_however_little_memory_there_is(tiny: tuple[Path, Any]) -> None:
    path, model = tiny
    prompts = [[number, 5, 7, 2, 9] for number in range(4)]
    params = BeamSearchParams(beam_width=4, max_tokens=50)
    found = []
    for fields in ({}, {"num_gpu_blocks_override": 20, "enable_prefix_caching": False}):
        llm = make_llm(path, **fields)
        try:
            found.append([one.sequences for one in llm.beam_search(prompts, params)])
            load = llm.load
        finally:
            llm.close()

    tokens = [[[one.tokens for one in sequences] for sequences in some] for some in found]
    assert tokens[0] == tokens[1]
    assert load.num_preemptions > 0
    assert load.num_tail_copies > 0
    for sequence in found[0][0]:
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        logprobs = [logits[at - 1, sequence.tokens[at]] for at in range(5, len(sequence.tokens))]
        assert sequence.cum_logprob == pytest.approx(float(sum(logprobs)), abs=1e-3)


def test_a_search_that_cannot_fit_is_refused_with_the_numbers(tiny: tuple[Path, Any]) -> None:
    llm = make_llm(tiny[0], num_gpu_blocks_override=8)
    try:
        with pytest.raises(UserError, match="60 tokens in each of 10 beams, the KV cache holds 128"):
            llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=10, max_tokens=57))
    finally:
        llm.close()


@pytest.mark.parametrize(("asked", "told"), [("never", None), (True, True), (False, False)])
def test_the_engine_is_told_which_of_three_ways_to_stop(asked: Any, told: bool | None) -> None:
    beams = BeamSearchParams(beam_width=2, max_tokens=4, early_stopping=asked).choice.beams

    assert beams is not None
    assert beams.early_stopping is told


@pytest.mark.parametrize("length_penalty", [40.0, -40.0])
def test_the_longest_context_at_the_highest_penalty_has_a_score(length_penalty: float) -> None:
    params = BeamParams(1, length_penalty)
    search = BeamSearch(params, 2**24 - 2, 2, 0, frozenset())

    search.advance([[(5, -3.0)]])
    search.advance([[(6, -4.0)]])

    (found,) = search.outputs()
    assert math.isfinite(found.score)
    assert found.score < 0


def test_other_parameters_are_not_taken_for_a_search(tiny: tuple[Path, Any]) -> None:
    llm = make_llm(tiny[0])
    try:
        with pytest.raises(InvalidRequest, match="they must be BeamSearchParams"):
            llm.beam_search([[1, 2]], SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="priority is 5"):
            llm.generate([[1, 2]], priority=5)  # type: ignore[arg-type]
        for fields in ({"messages": 5}, {"tools": 5}, {"chat_template_kwargs": [1]}):
            with pytest.raises(InvalidRequest) as caught:
                llm.chat(**{"messages": [], **fields})
            assert caught.value.param == next(iter(fields))
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"length_penalty": None}, "length_penalty"),
        ({"length_penalty": 1e3}, "length_penalty"),
        ({"length_penalty": -1e308}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": None}, "early_stopping"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"ignore_eos": "no"}, "ignore_eos"),
    ],
)
def test_what_is_no_search_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **changes})

    assert caught.value.param == param
