"""Policies rank by predicted start, by load, or in turn."""

from __future__ import annotations

import msgspec

from router.placement.policy import Candidate, LeastLoadPolicy, PrefixPolicy, RoundRobinPolicy, start_s
from router.placement.replica_view import NO_LOAD, ReplicaShape, ReplicaView
from workers.engine.cost_model import CostModel

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

    assert start_s(full, 1000) > start_s(free, 1000) + 0.1


def test_decodes_beside_it_slow_a_prefill_down() -> None:
    assert start_s(candidate("a", running=60), 1000) > start_s(candidate("b"), 1000)


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
