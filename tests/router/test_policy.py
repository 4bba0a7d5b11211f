"""Policies rank by predicted start, by load, or in turn."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.placement.candidate import forecast
from router.placement.policy import Candidate, LeastLoadPolicy, PrefixPolicy, RoundRobinPolicy
from router.placement.replica_view import NO_LOAD, ReplicaShape, ReplicaView
from workers.engine.cost_model import CostModel, attended

COST = CostModel(base_s=0.01, per_sequence_s=0.0001, per_token_s=0.0001)


def candidate(
    replica_id: str, *, hit: int = 0, queued: int = 0, running: int = 0, waiting: int = 0
) -> Candidate:
    view = ReplicaView(replica_id, ReplicaShape())
    view.load = msgspec.structs.replace(
        NO_LOAD, num_running=running, num_waiting=waiting, num_queued_tokens=queued, cost=COST
    )
    return Candidate(view, hit)


def order(policy: PrefixPolicy | LeastLoadPolicy | RoundRobinPolicy, *candidates: Candidate) -> list[str]:
    ranked = policy.rank(candidates, num_tokens=1000, key=b"key")
    return [r.candidate.view.replica_id for r in ranked]


def test_a_cached_prefix_wins_while_its_replica_is_not_busy() -> None:
    assert order(PrefixPolicy(), candidate("cold"), candidate("warm", hit=960)) == ["warm", "cold"]


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    assert order(PrefixPolicy(), candidate("cold"), candidate("warm", hit=960, queued=3000))[0] == "cold"


def test_own_bookings_count_like_reported_work() -> None:
    busy, idle = candidate("busy", hit=500), candidate("idle")
    busy.view.book("r", 2000, [])

    assert order(PrefixPolicy(), busy, idle)[0] == "idle"


def test_a_full_batch_costs_the_wait_for_a_seat() -> None:
    full, free = candidate("full", running=64, waiting=8), candidate("free", running=32)

    assert forecast(full, 1000).start_s > forecast(free, 1000).start_s + 0.1


def test_decodes_beside_it_slow_a_prefill_down() -> None:
    assert forecast(candidate("a", running=60), 1000).start_s > forecast(candidate("b"), 1000).start_s


def test_equal_replicas_are_chosen_by_key_and_stay_chosen_when_others_come() -> None:
    few = [candidate(f"r{i}") for i in range(4)]
    more = [*few, *(candidate(f"s{i}") for i in range(4))]
    winners: dict[bytes, str] = {}
    for i in range(200):
        winners[bytes([i])] = PrefixPolicy().rank(few, 1000, bytes([i]))[0].candidate.view.replica_id

    assert set(winners.values()) == {"r0", "r1", "r2", "r3"}
    num_moved = 0
    for key, winner in winners.items():
        now = PrefixPolicy().rank(more, 1000, key)[0].candidate.view.replica_id
        assert now == winner or now.startswith("s")
        num_moved += now != winner
    assert 60 < num_moved < 140  # half of the keys, on average


def test_round_robin_takes_turns() -> None:
    policy = RoundRobinPolicy()
    both = candidate("a"), candidate("b")

    assert [order(policy, *both)[0] for _ in range(4)] == ["a", "b", "a", "b"]


def test_least_load_counts_requests() -> None:
    assert (
        order(LeastLoadPolicy(), candidate("a", running=3), candidate("b", waiting=1, queued=9000))[0] == "b"
    )


# Tiers, and what long contexts cost


def of_cost(
    cost: CostModel, *, hit: int = 0, on_host: int = 0, queued: int = 0, attended: int = 0
) -> Candidate:
    found = candidate("a", queued=queued)
    load = msgspec.structs.replace(found.view.load, cost=cost, num_queued_attended=attended)
    found.view.load = load
    return Candidate(found.view, hit, on_host)


def test_blocks_in_host_memory_cost_their_copies_and_nothing_else() -> None:
    cost = replace(COST, copy_base_s=0.001, copy_block_s=0.0005)

    on_device, on_host = (forecast(of_cost(cost, hit=960, on_host=n), 1000) for n in (0, 640))

    assert on_device.copy_s == 0
    assert on_host.copy_s == pytest.approx(0.001 + 40 * 0.0005)
    assert (on_host.wait_s, on_host.work_s) == (on_device.wait_s, on_device.work_s)


def test_blocks_that_take_longer_to_copy_than_to_compute_count_as_not_there() -> None:
    slow = replace(COST, copy_block_s=1.0)

    assert forecast(of_cost(slow, hit=960, on_host=640), 1000) == forecast(of_cost(slow, hit=320), 1000)


def test_a_replica_with_the_prefix_on_its_device_comes_before_one_with_it_in_host_memory() -> None:
    cost = replace(COST, copy_base_s=0.02)
    device, host = (Candidate(candidate(name).view, 960, n) for name, n in (("device", 0), ("host", 960)))
    for one in (device, host):
        one.view.load = msgspec.structs.replace(one.view.load, cost=cost)

    assert order(PrefixPolicy(), host, device, candidate("cold")) == ["device", "host", "cold"]


def test_uncached_tokens_behind_a_long_context_cost_more() -> None:
    cost = replace(COST, per_attended_s=1e-8)

    short, long = (forecast(of_cost(cost, hit=num - 1000), num) for num in (1000, 101_000))

    assert long.work_s - short.work_s == pytest.approx(1e-8 * 1000 * 100_000)


def test_a_queue_of_short_prompts_is_not_priced_as_one_long_one() -> None:
    cost = replace(COST, per_attended_s=1e-8)
    hundred = of_cost(cost, queued=100_000, attended=100 * attended(1000, 0))
    single = of_cost(cost, queued=100_000, attended=attended(100_000, 0))

    assert forecast(single, 1000).wait_s - forecast(hundred, 1000).wait_s == pytest.approx(
        1e-8 * (100_000**2 - 100 * 1000**2) / 2
    )


def test_a_booking_counts_what_its_tokens_attend_to() -> None:
    cost = replace(COST, per_attended_s=1e-8)
    busy = of_cost(cost)
    before_s = busy.view.queued_work_s
    busy.view.book("r", 1000, [], num_cached_tokens=50_000)

    assert busy.view.queued_work_s - before_s == pytest.approx(1000 * 1e-4 + 1e-8 * attended(1000, 50_000))
    busy.view.settle("r")
    assert busy.view.queued_work_s == before_s
    busy.view.check()
