"""Hours of requests of every kind leave the brain no larger than a few minutes did."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import pytest

from workers.engine.request import BeamParams

EOS = 7
POLICIES = ("fcfs", "priority", "fair")


def add_any(bench: Any, draw: random.Random, number: int) -> list[str]:
    """A request, or choices of one, of a kind that is unkind: long or short, cancelled, sharing."""
    fields: dict[str, Any] = {
        "max_tokens": draw.choice((1, 3, 20)),
        "priority": draw.randrange(3),
        "tenant": f"tenant {draw.randrange(50)}",
        "ignore_eos": draw.random() < 0.5,
    }
    prompt_len = draw.choice((1, 2, 9, 30))
    prompt = [draw.randrange(3) if draw.random() < 0.5 else 5] * prompt_len
    kind = draw.randrange(5)
    if kind == 0:
        return [bench.add(prompt, beams=BeamParams(draw.randrange(1, 4)), **fields)]
    if kind == 1:
        return [bench.add(prompt, choice_index=index, **fields) for index in range(draw.randrange(2, 5))]
    if kind == 2:
        fields["num_logprobs"] = draw.randrange(20)
    if kind == 3:
        fields["grammar"] = draw.choice(("7:100", "3:4", "11:9:3"))
    return [bench.add(prompt, seed=number, **fields)]


def run_some(bench: Any, draw: random.Random, num_requests: int) -> None:
    """Keep about a dozen requests going, cancel one in five, and forget what the tests' bench remembers."""
    engine = bench.engine
    for number in range(num_requests):
        ids = add_any(bench, draw, number)
        for _ in range(draw.randrange(4)):
            if engine.has_work:
                bench.step()
        if draw.random() < 0.2:
            engine.abort(draw.choice(ids))
        engine.drain_cache_events()
    bench.run(max_steps=20_000)
    engine.drain_cache_events()
    for kept in (bench.token_ids, bench.finish_reasons, bench.beams, bench.outputs, bench.requests):
        kept.clear()


def check_growth(make_bench: Any, policy: str, num_requests: int) -> None:
    bench = make_bench(
        num_blocks=40, num_host_blocks=30, max_num_seqs=12, policy=policy, run_ahead=1, eos_token_ids=(EOS,),
        preemption_mode="swap", copy_lag=1,
    )  # fmt: skip
    draw = random.Random(1)
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(3):
            run_some(bench, draw, num_requests)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    load = bench.engine.load()
    assert load.num_preemptions > 0
    assert load.num_forked_blocks > 0
    assert load.num_free_blocks == load.num_blocks
    assert load.num_free_host_blocks == load.num_host_blocks
    assert sizes[2] - sizes[1] < 20_000


def test_requests_leave_nothing_behind(make_bench) -> None:
    check_growth(make_bench, "fair", num_requests=60)


@pytest.mark.parametrize("is_told", [True, False])
def test_blocks_leave_an_entry_each_however_many_prompts_have_come(make_bench, is_told: bool) -> None:
    bench = make_bench(num_blocks=16, num_host_blocks=16, copy_lag=1)

    for number in range(100):  # each fills five blocks that no other has
        bench.add([number % 97, number // 97, *range(18)], max_tokens=2, seed=number)
        bench.run(max_steps=1000)
        if is_told:
            bench.engine.drain_cache_events()

    log = bench.engine._scheduler.cache._log
    assert len(log.snapshot().hashes) <= 16
    assert len(log._tiers) <= 32
    assert log.num_changed <= 32


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_hour_of_requests_leaves_nothing_behind(make_bench, policy: str) -> None:
    check_growth(make_bench, policy, num_requests=4_000)
