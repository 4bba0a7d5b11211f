"""Prompts may be kept from making the steps of others long, by what the cost model says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.engine.cost_model import CostModel

COST = CostModel(base_s=0.01, per_sequence_s=0.0, per_token_s=0.001)


def make_busy(make_bench, **fields):
    """A bench with one request that decodes."""
    bench = make_bench(
        max_model_len=512, num_blocks=200, max_num_batched_tokens=256, cost=COST, enable_prefix_caching=False,
        **fields,
    )  # fmt: skip
    bench.add(4, max_tokens=100)
    bench.step()
    return bench


@pytest.mark.parametrize(("growth", "num_tokens"), [(None, 200), (2.0, 20), (6.0, 60), (0.1, 16)])
def test_a_long_prompt_takes_of_a_step_what_it_may(make_bench, growth, num_tokens) -> None:
    bench = make_busy(make_bench, max_step_growth=growth)
    bench.add(200)

    plan = bench.plan()

    assert plan.num_tokens == [1, num_tokens]
    bench.apply()
    bench.run()
    bench.assert_all_as_expected()


def test_the_limit_is_for_all_prompts_of_a_step_together(make_bench) -> None:
    bench = make_busy(make_bench, max_step_growth=3.0)
    for _ in range(3):
        bench.add(20)

    plan = bench.plan()

    assert plan.num_tokens == [1, 20, 16]
    bench.apply()


def test_prompts_alone_take_all_there_is(make_bench) -> None:
    bench = make_bench(
        max_model_len=512, num_blocks=200, max_num_batched_tokens=256, cost=COST, max_step_growth=1.0
    )
    bench.add(200)

    assert bench.plan().num_tokens == [200]


def test_the_cost_model_says_how_many_tokens_fit_a_time() -> None:
    for cost in (COST, CostModel(per_attended_s=1e-7)):
        num_tokens = cost.prefill_tokens(0.05, 300)
        assert cost.prefill_s(num_tokens, 300) <= 0.05 < cost.prefill_s(num_tokens + 1, 300)


@pytest.mark.parametrize(("max_overhead", "most"), [(0.04, 500), (0.02, 1000)])
def test_of_many_prompts_a_step_takes_what_makes_it_efficient(
    make_bench, max_overhead: float, most: int
) -> None:
    cost = replace(COST, base_s=0.02)
    bench = make_bench(
        max_model_len=1024,
        num_blocks=1000,
        max_num_batched_tokens=2048,
        cost=cost,
        max_num_seqs=16,
        max_prefill_overhead=max_overhead,
    )
    assert cost.ample_prefill_tokens(max_overhead) == pytest.approx(most)
    count = -(-most // 300)
    for _ in range(2 * count):
        bench.add(300)

    first = bench.plan()
    bench.apply()
    second = bench.plan()
    bench.apply()

    assert first.num_tokens == [300] * count
    assert second.num_tokens == [1] * count + [300] * count
    bench.run()
    bench.assert_all_as_expected()


@pytest.mark.parametrize("base_s", [0.0, 1e-9])
def test_steps_are_made_where_none_has_a_fixed_part(make_bench, base_s: float) -> None:
    bench = make_bench(num_blocks=400, max_num_batched_tokens=1024, cost=replace(COST, base_s=base_s))
    for _ in range(3):
        bench.add(20)

    assert bench.plan().num_tokens == [20, 20, 20]
    bench.apply()
    bench.run()


def test_one_long_prompt_is_not_cut_for_it(make_bench) -> None:
    bench = make_bench(max_model_len=1024, num_blocks=400, max_num_batched_tokens=1024, cost=COST)
    bench.add(900)

    assert bench.plan().num_tokens == [900]
