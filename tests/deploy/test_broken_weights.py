"""Weights with NaN or infinity end what meets them with an error that says so, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.offline.beam_search import BeamSearchParams
from deploy.offline.failures import PromptsFailed
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
    "with a least length": lambda llm: generate(llm, 1, BROKEN, temperature=0, min_tokens=2),
    "with tokens allowed": lambda llm: generate(llm, 1, BROKEN, seed=1, allowed_token_ids=[5, 6]),
    "biased": lambda llm: generate(llm, 1, BROKEN, seed=1, logit_bias={3: 1.0}),
    "beams": lambda llm: llm.beam_search([[1, BROKEN]], BeamSearchParams(beam_width=3, max_tokens=4)),
    "embedded": lambda llm: llm.embed([[1, BROKEN]], use_tqdm=False),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_request_without_finite_logits_ends_with_an_error(llm: LLM, kind: str) -> None:
    with pytest.raises(ShoalError, match="logits are no finite numbers: its weights hold NaN"):
        ENDS[kind](llm)

    llm._loop.engine.check()
    assert len(generate(llm, 1, 2, 3, temperature=0)) == 4


def test_prompts_that_leave_no_token_allowed_fail_by_their_place_while_others_finish(llm: LLM) -> None:
    none_left = SamplingParams(
        max_tokens=4, min_tokens=2, allowed_token_ids=[5], stop_token_ids=[5], detokenize=False
    )
    free = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)

    with pytest.raises(
        PromptsFailed, match=r"prompt 0 of 3.*min_tokens left no token.*failed 1 more"
    ) as caught:
        llm.generate([[1, 2], [1, 2, 3], [4]], [none_left, free, none_left], use_tqdm=False)

    bad, good, _ = caught.value.outputs
    assert caught.value.failed == [0, 2]
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert "allow one more" in str(bad.outputs[0].error)
    assert good.outputs[0].token_ids == generate(llm, 1, 2, 3, temperature=0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "prompt 1 of 2 .from 0.: the prompt has no tokens"),
        ([1] * 200, "prompt 1 of 2 .from 0.: the prompt has 200 tokens, this model takes 128"),
        ([97], "prompt 1 of 2 .from 0.: token id 97 is outside"),
        ("text", "prompt 1 of 2 .from 0.: the tokenizer was left out"),
        (None, "prompt 1 of 2 .from 0.: a prompt is None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["generate", "embed"])
def test_a_prompt_that_cannot_be_served_is_named_by_its_place(
    llm: LLM, way: str, wrong: Any, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        getattr(llm, way)([[1, 2], wrong], use_tqdm=False)

    assert len(generate(llm, 1, 2, 3, temperature=0)) == 4


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(llm: LLM) -> None:
    full = [1, 2, 3, 4] * 32

    (output,) = llm.embed([full], use_tqdm=False)

    assert output.outputs.hidden_size == 64
    with pytest.raises(UserError, match="129 tokens, this model takes 128: shorten"):
        llm.embed([[1, *full]], use_tqdm=False)
    with pytest.raises(UserError, match="128 tokens, this model takes 128 with its output"):
        generate(llm, *full)


def test_the_best_of_several_choices_are_given(llm: LLM) -> None:
    params = {"max_tokens": 6, "seed": 3, "ignore_eos": True, "detokenize": False}
    (every,) = llm.generate([[1, 2, 3]], SamplingParams(n=5, logprobs=0, **params), use_tqdm=False)

    (best,) = llm.generate([[1, 2, 3]], SamplingParams(n=2, best_of=5, **params), use_tqdm=False)

    ranked = sorted(every.outputs, key=lambda one: -one.cumulative_logprob)  # type: ignore[operator]
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None
    assert best.finished


def test_biases_are_of_token_ids() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias has the key '5'"):
        SamplingParams(logit_bias={"5": 1.0})  # type: ignore[dict-item]


def test_swapping_needs_memory_to_swap_to() -> None:
    shape = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
    with pytest.raises(InvalidRequest, match="give --swap-space"):
        LLM(str(shape), load_format="dummy", preemption_mode="swap", swap_space=0, skip_tokenizer_init=True)


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: generate(llm, 1, 2),
    "beam_search": lambda llm: llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2, max_tokens=2)),
    "embed": lambda llm: llm.embed([[1, 2]], use_tqdm=False),
    "encode": lambda llm: llm.encode([[1, 2]], use_tqdm=False),
    "restart_engine": lambda llm: llm.restart_engine(),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_closed_says_so(ranks: int) -> None:
    shape = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
    llm = LLM(
        str(shape), load_format="dummy", skip_tokenizer_init=True, cpu_threads=1, kv_cache_gib=0.01,
        max_model_len=64, tensor_parallel_size=ranks,
    )  # fmt: skip
    llm.close()
    llm.close()

    for call in CALLS.values():
        with pytest.raises(InvalidRequest, match=r"was closed.*make another"):
            call(llm)


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
