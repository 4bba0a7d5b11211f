"""What a replica tells the autoscaler."""

from __future__ import annotations

import msgspec
import pytest

from cluster.demand import HORIZON_S, DemandMeter
from router.placement.replica_view import NO_LOAD
from workers.brain_messages import Load
from workers.engine.cost_model import CostModel

COST = CostModel(base_s=0.01, per_sequence_s=0.001, per_token_s=1e-4, per_context_token_s=1e-6)


def load(**changes: object) -> Load:
    return msgspec.structs.replace(NO_LOAD, cost=COST, num_blocks=100, num_free_blocks=100, **changes)


def meter_from(first: Load) -> DemandMeter:
    return DemandMeter(first, 0.0, max_num_seqs=8, block_size=16)


def test_a_demand_says_what_waits_and_what_a_step_takes() -> None:
    meter = meter_from(load())

    demand = meter.measure(
        load(num_queued_tokens=5000, num_running=4, num_waiting=2, num_context_tokens=1000), 1.0
    )

    assert demand.queued_work_s == pytest.approx(0.5)
    assert demand.step_s == pytest.approx(0.01 + 0.004 + 0.001)
    assert demand.step_base_s == 0.01
    assert demand.num_requests == 6


def test_blocks_that_are_held_or_waited_for_count_as_used() -> None:
    full = msgspec.structs.replace(load(), num_free_blocks=25)
    queued = msgspec.structs.replace(full, num_waiting=1, num_queued_tokens=320)

    assert meter_from(load()).measure(full, 1.0).room_share == 0.75
    assert meter_from(load()).measure(queued, 1.0).room_share == 0.95


def test_seats_that_are_taken_or_waited_for_count_as_used() -> None:
    assert meter_from(load()).measure(load(num_running=8, num_waiting=4), 1.0).room_share == 1.5


def test_steady_work_is_told_as_its_share_and_ends_with_the_work() -> None:
    meter = meter_from(load())
    num_prompt = num_cached = 0
    for second in range(1, 60):
        num_prompt, num_cached = num_prompt + 8000, num_cached + 3000  # 5000 computed: 0.5 s
        demand = meter.measure(
            load(num_prompt_tokens=num_prompt, num_cached_tokens=num_cached), float(second)
        )

    assert demand.work_share == pytest.approx(0.5, rel=0.01)
    later = load(num_prompt_tokens=num_prompt, num_cached_tokens=num_cached)
    assert meter.measure(later, 59.0 + HORIZON_S).work_share < 0.2


def test_two_calls_at_one_moment_say_the_same() -> None:
    meter = meter_from(load())

    first = meter.measure(load(num_output_tokens=100, num_running=1), 1.0)

    assert meter.measure(load(num_output_tokens=200, num_running=1), 1.0).work_share == first.work_share > 0


def test_what_waits_at_ingresses_is_work_that_queues() -> None:
    meter = meter_from(load())

    assert meter.measure(load(num_queued_tokens=5000), 1.0, num_held_tokens=20_000).queued_work_s == 2.5
