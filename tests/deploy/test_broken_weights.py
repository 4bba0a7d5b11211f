"""Weights with NaN or infinity end what meets them with an error that says so, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deploy.offline.beam_search import BeamSearchParams
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams
from workers.engine.errors import ShoalError

BROKEN = 7
"""The only token whose embedding is no number."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny random model that BROKEN breaks, wherever it is read."""
    import transformers

    folder = tmp_path_factory.mktemp("broken")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[BROKEN, 3] = math.nan
    model.save_pretrained(folder)
    llm = LLM(str(folder), skip_tokenizer_init=True, cpu_threads=1, kv_cache_gib=0.01)
    yield llm
    llm.close()


def generate(llm: LLM, *token_ids: int, **params: Any) -> list[int]:
    wanted = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, **params)
    (output,) = llm.generate([list(token_ids)], wanted, use_tqdm=False)
    return output.outputs[0].token_ids


ENDS: dict[str, Callable[[LLM], object]] = {
    "greedy": lambda llm: generate(llm, 1, BROKEN, temperature=0),
    "sampled": lambda llm: generate(llm, 1, BROKEN, seed=1),
    "filtered": lambda llm: generate(llm, 1, BROKEN, seed=1, top_p=0.5, top_k=9, min_p=0.1),
    "penalized, with log-probabilities": lambda llm: generate(
        llm, 1, BROKEN, temperature=0, repetition_penalty=1.2, logprobs=2
    ),
    "beams": lambda llm: llm.beam_search([[1, BROKEN]], BeamSearchParams(beam_width=3, max_tokens=4)),
    "embedded": lambda llm: llm.embed([[1, BROKEN]], use_tqdm=False),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_request_without_finite_logits_ends_with_an_error(llm: LLM, kind: str) -> None:
    with pytest.raises(ShoalError, match="logits are no finite numbers: its weights hold NaN"):
        ENDS[kind](llm)

    llm._engine.check()
    assert len(generate(llm, 1, 2, 3, temperature=0)) == 4
