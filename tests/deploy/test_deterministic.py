"""With ``deterministic``, numbers are equal bit for bit however a request is computed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shoal import LLM, SamplingParams
from workers.engine.errors import UserError
from workers.engine.request import EngineRequest

TINY = str(Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny")
PROMPTS = [
    [(7 * number + 3 * i) % 500 for i in range(length)] for number, length in enumerate((1, 14, 31, 45))
]
PROMPTS += [[*PROMPTS[3], 9], [*PROMPTS[2][:20], 4, 4]]
"""The last two begin as others do."""


def make_llm(**fields: Any) -> LLM:
    defaults = {
        "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "cpu_threads": 2,
        "max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 64,
        "swap_space": 0.05, "deterministic": True,
    }  # fmt: skip
    return LLM(TINY, **{**defaults, **fields})


def params_of(index: int, num_choices: int = 1) -> SamplingParams:
    """Every other prompt is greedy."""
    return SamplingParams(
        max_tokens=8, temperature=index % 2, seed=index, logprobs=2, ignore_eos=True, detokenize=False,
        n=num_choices,
    )  # fmt: skip


def numbers_of(llm: LLM, indices: Iterable[int], num_choices: int = 1) -> list[Any]:
    """Tokens and log-probabilities of each choice of some prompts."""
    chosen = list(indices)
    params = [params_of(index, num_choices) for index in chosen]
    outputs = llm.generate([PROMPTS[index] for index in chosen], params, use_tqdm=False)
    return [
        [
            (one.token_ids, [[entry.logprob for entry in top.values()] for top in one.logprobs or ()])
            for one in output.outputs
        ]
        for output in outputs
    ]


def tokens_of(numbers: list[Any]) -> list[list[list[int]]]:
    """Without log-probabilities."""
    return [[token_ids for token_ids, _ in choices] for choices in numbers]


ALL = range(len(PROMPTS))


@pytest.fixture(name="llm", scope="module")
def make_shared_llm() -> Any:
    llm = make_llm()
    yield llm
    llm.close()


@pytest.fixture(name="alone", scope="module")
def run_alone(llm: LLM) -> list[Any]:
    """Each prompt by itself, computed in one piece, with nothing cached."""
    llm.restart_engine(enable_prefix_caching=False)
    return [numbers_of(llm, [index])[0] for index in ALL]


def check_any_way(llm: LLM, alone: list[Any], fields: dict[str, Any], is_repeated: bool) -> None:
    llm.restart_engine(**fields)

    found = numbers_of(llm, ALL)
    if is_repeated:
        found = numbers_of(llm, ALL)

    load = llm.load
    event(f"preempted: {load.num_preemptions > 0}, swapped: {load.num_swap_preemptions > 0}")
    event(f"cached: {load.num_cached_tokens > 0}, from the host: {load.num_host_cached_tokens > 0}")
    assert found == alone


any_way = given(
    fields=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(7, 128),
            "max_num_seqs": st.integers(1, 16),
            "num_blocks": st.integers(5, 12),
            "num_host_blocks": st.sampled_from([0, 16, 64]),
            "enable_prefix_caching": st.booleans(),
            "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
            "run_ahead": st.integers(0, 2),
        }
    ),
    is_repeated=st.booleans(),
)


@pytest.mark.timeout(300)
@any_way
@settings(max_examples=5, deadline=None)
def test_however_a_prompt_is_computed_its_numbers_are_the_same_to_the_bit(
    llm: LLM, alone: list[Any], fields: dict[str, Any], is_repeated: bool
) -> None:
    check_any_way(llm, alone, fields, is_repeated)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@any_way
@settings(max_examples=500, deadline=None)
def test_in_500_ways_numbers_are_the_same_to_the_bit(
    llm: LLM, alone: list[Any], fields: dict[str, Any], is_repeated: bool
) -> None:
    check_any_way(llm, alone, fields, is_repeated)


def test_what_breaks_off_goes_on_at_another_replica_to_the_bit(llm: LLM, alone: list[Any]) -> None:
    other = make_llm(max_num_batched_tokens=16, num_gpu_blocks_override=24, preemption_mode="swap")
    moved = [(index, num_told) for index in ALL for num_told in (1, 3, 7)]
    for index, num_told in moved:
        told, left = alone[index][0][0][:num_told], other.max_model_len - len(PROMPTS[index])
        wanted = params_of(index).choice(0, 0, left, ())
        other._loop.engine.add(
            EngineRequest(f"{index} after {num_told}", PROMPTS[index], wanted, output_token_ids=told), 0.0
        )

    found: dict[str, list[Any]] = {}
    while other._loop.engine.has_work:
        while (plan := other._loop.engine.plan(0.0)) is not None:
            other._loop.executor.launch(plan)
        for output in other._loop.engine.apply(other._loop.executor.collect(), 0.0):
            assert output.logprobs is not None
            (scores,) = output.logprobs
            found.setdefault(output.request_id, []).append((output.token_ids, scores.top_logprobs))
    other.close()

    for index, num_told in moved:
        token_ids, scores = alone[index][0]
        rest = zip(token_ids[num_told:], scores[num_told:], strict=True)
        assert found[f"{index} after {num_told}"] == [([token], top[:2]) for token, top in rest]


def test_a_choice_that_shares_its_prompt_is_what_it_would_be_alone(llm: LLM) -> None:
    llm.restart_engine()
    together = numbers_of(llm, ALL[1:4], num_choices=3)
    num_shared = llm.load.num_forked_blocks
    llm.restart_engine(enable_prefix_caching=False, max_num_seqs=1)

    assert numbers_of(llm, ALL[1:4], num_choices=3) == together
    assert num_shared > 0


def test_two_ranks_agree_with_themselves_and_on_one_ranks_tokens(alone: list[Any]) -> None:
    llm = make_llm(tensor_parallel_size=2, cpu_threads=1)
    try:
        together = numbers_of(llm, ALL)
        assert tokens_of(together) == tokens_of(alone)  # whose sums have other last bits
        llm.restart_engine(max_num_batched_tokens=17, num_blocks=6)
        assert numbers_of(llm, ALL) == together
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"dtype": "bfloat16"}, "float32"), ({"tensor_parallel_size": 4}, "more than 2 ranks are summed")],
)
def test_what_the_mode_does_not_cover_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make_llm(**fields)
