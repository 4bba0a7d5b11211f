from __future__ import annotations

from itertools import pairwise

import pytest

from workers.engine.block_pool import BlockPool
from workers.engine.cache_log import DEVICE, CacheLog
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.host_tier import HostTier

TIGHT = {"num_blocks": 8, "block_size": 2, "num_host_blocks": 16, "preemption_mode": "swap"}
TEXT = list(range(100, 130))
HIDES_TWO_COPIES = {
    "block_size": 2,
    "num_host_blocks": 200,
    "max_num_batched_tokens": 8,
    "cost": CostModel(base_s=1e-9, per_sequence_s=1e-9, per_token_s=0.001, copy_block_s=0.0004),
}
"""A step of eight tokens: it takes 8 ms and fills four blocks."""


def run_until_preempted(bench) -> None:
    while not bench.engine.load().num_preemptions:
        bench.step()


def test_a_preempted_request_is_copied_out_and_back_and_computes_nothing_twice(make_bench) -> None:
    bench = make_bench(**TIGHT, enable_prefix_caching=False)
    bench.add(6, max_tokens=9)
    bench.add(6, max_tokens=9)
    plans = []

    while bench.engine.has_work:
        while (plan := bench.plan()) is not None:
            plans.append(plan)
        bench.apply()

    bench.assert_all_as_expected()
    load = bench.engine.load()
    assert (load.num_preemptions, load.num_swap_preemptions) == (1, 1)
    assert load.num_blocks_swapped_out == load.num_blocks_swapped_in > 0
    assert sum(plan.num_batched_tokens for plan in plans) == 2 * (6 + 8)
    outs = [copy for plan in plans for copy in plan.swap_out]
    ins = [copy for plan in plans for copy in plan.swap_in]
    assert [(copy.host, copy.generation) for copy in ins] == [(copy.host, copy.generation) for copy in outs]


def test_others_compute_while_blocks_are_on_their_way(make_bench) -> None:
    bench = make_bench(
        num_blocks=20, block_size=2, num_host_blocks=100, max_num_batched_tokens=20, copy_lag=3
    )
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()
    for _ in range(3):
        evict_text(bench)
    bench.add(2, max_tokens=10)
    again = bench.add(TEXT[:9], max_tokens=2)

    plans = [bench.plan()]
    bench.apply()
    while again not in bench.finish_reasons:
        plans.append(bench.plan())
        bench.apply()

    assert len(plans[0].swap_in) == 4
    assert [len(plan.rows) for plan in plans] == [1, 1, 1, 1, 2, 2]  # four steps of the other, then both
    assert [plan.starts[-1] for plan in plans[4:]] == [8, 9]
    bench.run()
    bench.assert_all_as_expected()


@pytest.mark.parametrize(("copy_block_s", "is_swapped"), [(1e-6, True), (1.0, False)])
def test_what_takes_less_time_is_done(make_bench, copy_block_s: float, is_swapped: bool) -> None:
    cost = CostModel(copy_base_s=0.0, copy_block_s=copy_block_s)
    bench = make_bench(**{**TIGHT, "preemption_mode": "auto"}, cost=cost)
    bench.add(6, max_tokens=9)
    bench.add(6, max_tokens=9)

    run_until_preempted(bench)

    assert bool(bench.engine.load().num_swap_preemptions) is is_swapped
    bench.run()
    bench.assert_all_as_expected()


def test_a_full_host_tier_means_recomputing(make_bench) -> None:
    bench = make_bench(**{**TIGHT, "num_host_blocks": 2})
    bench.add(6, max_tokens=9)
    bench.add(6, max_tokens=9)

    bench.run()

    bench.assert_all_as_expected()
    assert bench.engine.load().num_preemptions == 1
    assert bench.engine.load().num_swap_preemptions == 0


def test_preempted_requests_leave_a_share_of_the_host_to_prefixes(make_bench) -> None:
    bench = make_bench(**{**TIGHT, "num_host_blocks": 6}, kv_host_fraction=0.75)
    bench.add(6, max_tokens=9)
    bench.add(6, max_tokens=9)

    bench.run()

    assert bench.engine.load().num_preemptions == 1
    assert bench.engine.load().num_swap_preemptions == 0  # it would take more than a quarter


def test_a_request_cancelled_while_it_is_away_gives_its_host_blocks_back(make_bench) -> None:
    bench = make_bench(**TIGHT)
    bench.add(6, max_tokens=9)
    young = bench.add(6, max_tokens=9)
    run_until_preempted(bench)
    assert bench.engine.load().num_free_host_blocks < 16

    bench.engine.abort(young)
    bench.run()

    assert bench.engine.load().num_free_host_blocks == 16


def test_a_request_that_comes_back_corrupted_is_computed_again(make_bench) -> None:
    bench = make_bench(**TIGHT, copy_lag=1)
    bench.add(6, max_tokens=9)
    bench.add(6, max_tokens=9)
    run_until_preempted(bench)
    while not bench.rank.host_blocks:
        bench.step()
    for host_block in bench.rank.host_blocks:
        bench.rank.flip(host_block)

    bench.run()

    bench.assert_all_as_expected()
    load = bench.engine.load()
    assert load.num_corrupt_blocks == load.num_blocks_swapped_in > 0


def evict_text(bench) -> None:
    """Use the device's blocks for other prompts until the text's are on the host alone."""
    for number in range(6):
        bench.add([number, *range(9)], max_tokens=1)
        bench.run()


def test_cold_prefixes_drift_to_the_host_and_are_found_there(make_bench) -> None:
    bench = make_bench(num_blocks=12, block_size=2, num_host_blocks=100, max_num_batched_tokens=12)
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()
    stored = bench.engine.drain_cache_events().stored
    evict_text(bench)
    events = bench.engine.drain_cache_events()
    assert set(stored) <= set(events.offloaded)

    again = bench.add(TEXT[:9], max_tokens=2)
    bench.run()

    assert [output.num_cached_tokens for output in bench.outputs if output.request_id == again] == [8, None]
    assert bench.engine.load().num_host_cached_tokens == 8
    bench.assert_all_as_expected()
    assert set(stored) <= set(bench.engine.drain_cache_events().stored)


def test_cold_blocks_drift_no_faster_than_steps_can_hide(make_bench) -> None:
    # A step of 8 ms hides two copies of 0.4 ms at a tenth of its time.
    cost = CostModel(base_s=0.008, per_sequence_s=1e-9, per_token_s=1e-9, copy_block_s=0.0004)
    bench = make_bench(
        num_blocks=40,
        block_size=2,
        num_host_blocks=100,
        max_num_batched_tokens=60,
        preemption_mode="swap",
        cost=cost,
    )

    bench.add(TEXT[:31], max_tokens=1)
    bench.run()
    bench.add([9] * 31, max_tokens=12)
    counts = [0]
    while bench.engine.has_work:
        bench.step()
        counts.append(bench.engine.load().num_blocks_swapped_out)

    # The prompt's step hands out 16 blocks: no more than half of its time. The others hand out hardly any.
    copied = [after - before for before, after in pairwise(counts)]
    assert max(copied) == 10
    assert max(copied[copied.index(10) + 1 :]) <= 2
    bench.assert_all_as_expected()


def test_nothing_drifts_to_the_host_that_is_computed_sooner_than_copied_back(make_bench) -> None:
    # A block of two tokens takes 0.2 ms to compute and 0.4 to copy.
    cost = CostModel(base_s=0.008, per_sequence_s=1e-9, per_token_s=0.0001, copy_block_s=0.0004)
    bench = make_bench(num_blocks=12, block_size=2, num_host_blocks=100, max_num_batched_tokens=12, cost=cost)
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()

    evict_text(bench)

    assert bench.engine.load().num_blocks_swapped_out == 0
    bench.assert_all_as_expected()


def test_blocks_that_drifted_are_handed_out_in_the_order_in_which_they_would_have_been() -> None:
    config = EngineConfig(max_model_len=64, num_blocks=16, block_size=2, num_host_blocks=40)
    log = CacheLog()
    device = BlockPool(config.num_blocks, log, DEVICE)
    host = HostTier(config, device, log)
    for chain in range(2):
        blocks = device.take(6)
        for index, block_id in enumerate(blocks):
            device.register(block_id, bytes([chain, index]))
        device.release(blocks)
    before = [block_id for block_id in device.coldest() if device.hash_of(block_id)]

    for step in range(4):
        host.drift(step, num_hidden=2.0)
        host.take_plan(step)
        host.complete(step, [])

    assert host.num_blocks_out == 8
    assert [block_id for block_id in device.coldest() if device.hash_of(block_id)] == before


@pytest.mark.parametrize("comes_again", [False, True])
def test_the_copy_of_a_block_that_is_handed_out_meanwhile_is_given_up(comes_again: bool) -> None:
    config = EngineConfig(max_model_len=64, num_blocks=4, block_size=2, num_host_blocks=8)
    device = BlockPool(config.num_blocks, CacheLog(), DEVICE)
    host = HostTier(config, device, CacheLog())
    blocks = device.take(4)
    for block_id in blocks:
        device.register(block_id, bytes([block_id]))
    device.release(blocks)
    host.drift(0, num_hidden=2.0)
    overwritten, *others = (copy.device for copy in reversed(host.take_plan(0)[0]))

    assert device.num_free == 4
    assert device.take(1) == [overwritten]
    if comes_again:  # what was there at first, but not when the copy read it
        device.register(overwritten, bytes([overwritten]))
    host.complete(0, [])

    assert host.find(bytes([overwritten])) is None
    assert others
    assert all(host.find(bytes([block_id])) is not None for block_id in others)
    assert host.check([]) == []
    assert host.num_free_blocks == 8


def test_a_long_prompt_is_forgotten_once_the_device_has_been_filled_twice_without_another() -> None:
    config = EngineConfig(max_model_len=640, num_blocks=400, block_size=2, num_host_blocks=900)
    device = BlockPool(config.num_blocks, CacheLog(), DEVICE)
    host = HostTier(config, device, CacheLog())
    host.cold.note_request(100)
    host.cold.note_request(3)
    host.cold.note_request(120)
    assert host.cold.longest == 120

    for _ in range(8):
        device.release(device.take(100))
    host.cold.note_request(3)

    assert host.cold.longest == 3


@pytest.mark.parametrize("copy_lag", [0, 1, 2])
def test_a_prompt_is_found_whole_though_steps_hand_out_more_than_they_hide(make_bench, copy_lag: int) -> None:
    bench = make_bench(num_blocks=64, copy_lag=copy_lag, **HIDES_TWO_COPIES)
    prompt = list(range(100, 131))
    bench.add(prompt, max_tokens=1)
    bench.run()
    for number in range(6):
        bench.add([number, *range(30)], max_tokens=1)
        bench.run()

    again = bench.add(prompt, max_tokens=2)
    bench.run()

    assert [output.num_cached_tokens for output in bench.outputs if output.request_id == again] == [30, None]
    assert bench.engine.load().num_host_cached_tokens > 0
    bench.assert_all_as_expected()


@pytest.mark.parametrize("copy_lag", [0, 2])
def test_prompts_that_come_back_in_turn_are_all_found_whole(make_bench, copy_lag: int) -> None:
    # Each takes all its blocks at once and computes one token: nearly no time to copy what the next one overwrites.
    bench = make_bench(num_blocks=40, copy_lag=copy_lag, **HIDES_TWO_COPIES)
    prompts = [[number, *range(number, number + 30)] for number in range(7)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=1)
        bench.run()

    again = []
    for prompt in prompts * 2:
        again.append(bench.add(prompt, max_tokens=1))
        bench.run()

    found = {output.request_id: output.num_cached_tokens for output in bench.outputs}
    assert [found[request_id] for request_id in again] == [30] * len(again)
    bench.assert_all_as_expected()


def test_a_prompt_is_found_whole_after_steps_too_short_to_hide_one_copy(make_bench) -> None:
    # A step of 1 ms hides a quarter of a copy of 0.4 ms; prompts of 8 tokens take 9 ms.
    cost = CostModel(base_s=0.001, per_sequence_s=1e-9, per_token_s=0.001, copy_block_s=0.0004)
    bench = make_bench(num_blocks=32, block_size=2, num_host_blocks=100, max_num_batched_tokens=8, cost=cost)
    prompt = list(range(100, 131))
    bench.add(prompt, max_tokens=1)
    bench.run()
    bench.add([7], max_tokens=61)
    bench.run()

    again = bench.add(prompt, max_tokens=2)
    bench.run()

    assert [output.num_cached_tokens for output in bench.outputs if output.request_id == again] == [30, None]
    assert bench.engine.load().num_host_cached_tokens > 20
    bench.assert_all_as_expected()


def test_a_prompt_half_on_the_host_takes_its_blocks_once_and_is_computed_in_parts(make_bench) -> None:
    bench = make_bench(num_blocks=24, block_size=2, num_host_blocks=100, max_num_batched_tokens=8)
    bench.add(TEXT[:17], max_tokens=1)
    bench.run()
    for number in range(3):
        bench.add([number, *range(30)], max_tokens=1)
        bench.run()

    bench.add([*TEXT[:17], *range(50, 73)], max_tokens=1)
    num_free = [bench.engine.load().num_free_blocks]
    while bench.engine.has_work:
        bench.step()
        num_free.append(bench.engine.load().num_free_blocks)

    assert bench.engine.load().num_host_cached_tokens == 16
    # No part of it is taken for a request for fewer than no blocks (``BlockPool.take`` looks).
    assert min(num_free) == 24 - 20
    bench.assert_all_as_expected()


def test_siblings_wait_for_one_copy_of_their_prefix(make_bench) -> None:
    bench = make_bench(
        num_blocks=20, block_size=2, num_host_blocks=100, max_num_batched_tokens=20, copy_lag=3
    )
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()
    for _ in range(3):
        evict_text(bench)
        bench.add(list(range(50, 64)), max_tokens=1)
        bench.run()

    before = bench.engine.load().num_blocks_swapped_in
    for seed in range(3):
        bench.add(TEXT[:9], max_tokens=2, seed=seed)
    bench.run()

    assert bench.engine.load().num_blocks_swapped_in - before <= 4
    bench.assert_all_as_expected()


def test_a_copy_that_takes_longer_than_computing_is_not_made(make_bench) -> None:
    cost = CostModel(copy_block_s=1.0)
    bench = make_bench(num_blocks=12, block_size=2, num_host_blocks=100, max_num_batched_tokens=12, cost=cost)
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()
    evict_text(bench)

    bench.add(TEXT[:9], max_tokens=1)
    bench.run()

    assert bench.engine.load().num_blocks_swapped_in == 0
    bench.assert_all_as_expected()


def test_no_request_is_preempted_more_often_than_allowed(make_bench) -> None:
    bench = make_bench(num_blocks=9, block_size=1, max_preemptions=1, enable_prefix_caching=False)
    for _ in range(4):
        bench.add(1, max_tokens=8)

    bench.run()

    bench.assert_all_as_expected()
    assert {output.num_preemptions for output in bench.outputs} == {0, 1}


def test_waiting_siblings_are_queued_work_once(make_bench) -> None:
    bench = make_bench(block_size=4, max_num_seqs=1)
    bench.add(3, max_tokens=8)
    bench.step()

    for seed in range(3):
        bench.add(TEXT[:18], seed=seed)

    assert bench.engine.load().num_queued_tokens == 18 + 2 + 2
    bench.run()
    bench.assert_all_as_expected()


def test_a_request_whose_blocks_are_all_on_the_host_already_comes_back(make_bench) -> None:
    """Found by random schedules: it waited for copies that nobody had to make."""
    bench = make_bench(
        max_model_len=34, num_blocks=19, block_size=1, num_host_blocks=30, max_num_seqs=5,
        max_num_batched_tokens=2, run_ahead=1,
    )  # fmt: skip
    texts = [(0, 8, 0, 1), (1, 7, 5, 12), (0, 1, 0, 1), (2, 9, 0, 2), (1, 6, 0, 10), (0, 7, 0, 10)]
    for text, prompt_len, num_earlier, max_tokens in [*texts, (0, 1, 0, 1), (0, 1, 0, 1), (0, 1, 0, 1)]:
        prompt = [text * 10 + index // 3 for index in range(prompt_len)]
        bench.add(prompt, max_tokens=max_tokens, output_token_ids=[3] * num_earlier, seed=0)

    bench.run()

    bench.assert_all_as_expected()
