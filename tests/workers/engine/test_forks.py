"""Choices of one prompt share its blocks; the last one is copied when a branch writes to it."""

from __future__ import annotations

import pytest

from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.request import BeamParams, FinishReason

PROMPT = [7, 3, 9, 1, 4, 6]
"""A block of four tokens and half of another."""


def add_choices(bench, num_choices: int, **fields) -> list[str]:
    return [bench.add(PROMPT, seed=1, choice_index=index, **fields) for index in range(num_choices)]


@pytest.mark.parametrize("caches", [True, False])
def test_choices_sample_beside_the_first_and_compute_nothing_of_the_prompt(make_bench, caches) -> None:
    bench = make_bench(enable_prefix_caching=caches)
    add_choices(bench, 3)

    plan = bench.plan()
    bench.apply()

    assert plan.num_batched_tokens == len(PROMPT)
    assert len(plan.forks) == 2
    load = bench.engine.load()
    assert load.num_blocks - load.num_free_blocks == 2
    assert load.num_forked_blocks == 4


def test_each_branch_but_one_copies_the_last_block_before_it_writes(make_bench) -> None:
    bench = make_bench(enable_prefix_caching=False)
    add_choices(bench, 3)
    bench.plan()
    bench.apply()

    plan = bench.plan()
    bench.apply()

    tail = {copy.source for copy in plan.tail_copies}
    assert len(tail) == 1
    assert len({copy.target for copy in plan.tail_copies} - tail) == 2
    load = bench.engine.load()
    assert load.num_blocks - load.num_free_blocks == 1 + 3
    bench.run()
    bench.assert_all_as_expected()


def test_a_full_last_block_is_shared_and_never_copied(make_bench) -> None:
    bench = make_bench(enable_prefix_caching=False)
    for index in range(3):
        bench.add([*PROMPT, 5, 5], choice_index=index)

    bench.run()

    assert bench.engine.load().num_tail_copies == 0
    bench.assert_all_as_expected()


def test_the_last_branch_left_writes_in_place(make_bench) -> None:
    bench = make_bench(enable_prefix_caching=False)
    first, second = add_choices(bench, 2)
    bench.plan()
    bench.apply()
    bench.engine.abort(first)

    plan = bench.plan()

    assert plan.tail_copies == []
    assert plan.new_block_ids == [[1]]
    bench.apply()
    bench.run()
    assert (bench.token_ids[second], bench.finish_reasons[second]) == bench.expected(second)


def test_cancelling_a_choice_leaves_the_others_as_they_are(make_bench) -> None:
    bench = make_bench()
    ids = add_choices(bench, 3)
    bench.step()
    bench.engine.abort(ids[1])
    bench.run()

    for request_id in (ids[0], ids[2]):
        assert (bench.token_ids[request_id], bench.finish_reasons[request_id]) == bench.expected(request_id)
    load = bench.engine.load()
    assert load.num_free_blocks == load.num_blocks


def test_a_choice_that_comes_from_elsewhere_goes_on_by_itself(make_bench) -> None:
    bench = make_bench()
    bench.add(PROMPT, seed=1, max_tokens=6)
    bench.add(PROMPT, seed=1, choice_index=1, max_tokens=6, output_token_ids=[3, 3])

    plan = bench.plan()
    assert plan.forks == []
    bench.apply()
    bench.run()

    bench.assert_all_as_expected()


@pytest.mark.parametrize(
    "others", [{"hash_root": b"another"}, {"block_hashes": [b"x" * 16]}, {"num_prompt_logprobs": 1}]
)
def test_nothing_is_shared_with_another_tenant_another_trace_or_a_prompt_to_be_scored(
    make_bench, others
) -> None:
    bench = make_bench(enable_prefix_caching=False)
    bench.add(PROMPT, block_hashes=[b"y" * 16] if "block_hashes" in others else [])
    bench.add(PROMPT, **others)

    assert bench.plan().forks == []


def test_beams_share_what_they_have_in_common(make_bench) -> None:
    bench = make_bench(num_blocks=64, max_num_batched_tokens=64, enable_prefix_caching=False)
    bench.add(list(range(40)), max_tokens=4, beams=BeamParams(4))

    bench.step()
    bench.step()

    load = bench.engine.load()
    assert load.num_running == 4
    assert load.num_blocks - load.num_free_blocks <= 10 + 4


def test_a_search_that_is_preempted_finds_what_it_would_have_found(make_bench) -> None:
    bench = make_bench(num_blocks=19, max_num_seqs=9, enable_prefix_caching=False)
    for _ in range(3):
        bench.add(6, max_tokens=20, beams=BeamParams(3, early_stopping=None))

    bench.run()

    assert bench.engine.load().num_preemptions > 0
    bench.assert_all_as_expected()


def test_a_cancelled_search_leaves_nothing(make_bench) -> None:
    bench = make_bench()
    searched = bench.add(6, max_tokens=9, beams=BeamParams(3))
    other = bench.add(6)
    bench.step()
    bench.step()
    bench.engine.abort(searched)
    bench.run()

    assert searched not in bench.finish_reasons
    assert bench.finish_reasons[other] is FinishReason.LENGTH
    load = bench.engine.load()
    assert load.num_free_blocks == load.num_blocks


def test_a_search_that_can_never_fit_is_refused_with_the_numbers(make_bench) -> None:
    bench = make_bench(num_blocks=8)

    with pytest.raises(PromptTooLong, match="16 tokens in each of 3 beams, the KV cache holds 32"):
        bench.add(6, max_tokens=10, beams=BeamParams(3))
    with pytest.raises(
        InvalidRequest, match="width 9 is asked for, it must be from 1 to 8, what max_num_seqs"
    ):
        bench.add(6, beams=BeamParams(9))
    with pytest.raises(InvalidRequest, match="length_penalty is 1000"):
        bench.add(6, beams=BeamParams(2, 1e3))


@pytest.mark.parametrize(
    "field", [{"logit_bias": {1: 2.0}}, {"grammar": "7:100"}, {"presence_penalty": 1.0}, {"num_logprobs": 2}]
)
def test_a_search_ranks_by_the_models_own_probabilities(make_bench, field) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_bench().add(6, beams=BeamParams(2), **field)

    assert refused.value.param in {"logit_bias", "grammar", "presence_penalty", "logprobs"}
