"""Weights with NaN or infinity end what meets them with an error that says so, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.offline.beam_search import BeamSearchParams
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams
from workers.engine.errors import InvalidRequest, ShoalError, UserError

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


def test_a_request_that_leaves_no_token_allowed_ends_by_itself(llm: LLM) -> None:
    none_left = SamplingParams(
        max_tokens=4, min_tokens=2, allowed_token_ids=[5], stop_token_ids=[5], detokenize=False
    )
    free = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)

    bad, good = llm.generate([[1, 2], [1, 2, 3]], [none_left, free], use_tqdm=False)

    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert good.outputs[0].token_ids == generate(llm, 1, 2, 3, temperature=0)


def test_biases_are_of_token_ids() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias has the key '5'"):
        SamplingParams(logit_bias={"5": 1.0})  # type: ignore[dict-item]


def test_swapping_needs_memory_to_swap_to() -> None:
    shape = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
    with pytest.raises(InvalidRequest, match="give --swap-space"):
        LLM(str(shape), load_format="dummy", preemption_mode="swap", swap_space=0, skip_tokenizer_init=True)


@pytest.mark.parametrize("wrong", ["a", 0.5, math.nan, True, 2**40])
def test_a_priority_is_an_integer(llm: LLM, wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        llm.generate([[1, 2]] * 2, use_tqdm=False, priority=[0, wrong])

    assert len(generate(llm, 1, 2, 3, temperature=0)) == 4


def test_tensors_without_a_place_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=80, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    settings = {"skip_tokenizer_init": True, "cpu_threads": 1, "kv_cache_gib": 0.01}

    with pytest.raises(InvalidRequest, match="int4 takes widths that are multiples of 32, hidden_size is 80"):
        LLM(str(tmp_path), quantization="int4", **settings)
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no place, such as model\.layers\.1\."):
        LLM(str(tmp_path), **settings)
