"""On a GPU: forked choices, beams and the deterministic mode give what they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, BeamSearchParams, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = str(Path(__file__).parents[3] / "deploy" / "bench" / "shapes" / "qwen3-0.6b")
LENGTHS = (1, 17, 128, 129, 400, 1500)
PROMPTS = [[(7 * number + 3 * i * i) % 30000 for i in range(length)] for number, length in enumerate(LENGTHS)]


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Load the shape; a test that fails leaves the device's memory to the next all the same."""
    with ExitStack() as stack:

        def make(**fields: Any) -> LLM:
            llm = LLM(
                SHAPE, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64,
                swap_space=1, **fields,
            )  # fmt: skip
            stack.callback(llm.close)
            return llm

        yield make


def numbers_of(llm: LLM, indices: list[int], num_choices: int = 1) -> list[Any]:
    params = [
        SamplingParams(
            max_tokens=40, temperature=index % 2, seed=index, logprobs=1, ignore_eos=True, detokenize=False,
            n=num_choices,
        )
        for index in indices
    ]  # fmt: skip
    outputs = llm.generate([PROMPTS[index] for index in indices], params, use_tqdm=False)
    return [
        [
            (one.token_ids, [[entry.logprob for entry in top.values()] for top in one.logprobs or ()])
            for one in output.outputs
        ]
        for output in outputs
    ]


def test_beams_are_as_likely_as_said(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    found = llm.beam_search(PROMPTS[:5], BeamSearchParams(beam_width=4, max_tokens=32))
    num_copies = llm.load.num_tail_copies
    for prompt, output in zip(PROMPTS, found, strict=False):
        for sequence in output.sequences:
            scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
            scores = llm.generate([sequence.tokens], scoring, use_tqdm=False)[0].prompt_logprobs
            scored = sum(
                next(iter(scores[at].values())).logprob for at in range(len(prompt), len(sequence.tokens))
            )
            assert sequence.cum_logprob == pytest.approx(scored, rel=0.01)

    assert num_copies > 0


def test_with_deterministic_numbers_are_the_same_to_the_bit_however_computed(
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(deterministic=True)
    everything = list(range(len(PROMPTS)))
    llm.restart_engine(enable_prefix_caching=False)
    alone = [numbers_of(llm, [index])[0] for index in everything]

    for fields in (
        {},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 1000, "num_blocks": 140, "preemption_mode": "swap"},
        {"num_blocks": 140, "num_host_blocks": 0, "preemption_mode": "recompute"},
    ):
        llm.restart_engine(**fields)
        assert numbers_of(llm, everything) == alone, fields
        assert numbers_of(llm, everything) == alone, fields
    llm.restart_engine()
    together = numbers_of(llm, [2, 3, 4], num_choices=3)
    num_forked = llm.load.num_forked_blocks
    llm.restart_engine(enable_prefix_caching=False, max_num_seqs=1)
    assert numbers_of(llm, [2, 3, 4], num_choices=3) == together

    assert num_forked > 0
