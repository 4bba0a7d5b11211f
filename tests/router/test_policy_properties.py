"""What holds of every policy, and of the costs that they weigh."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.candidate import Candidate, forecast, sibling_key
from router.placement.policy import (
    POLICIES,
    ConsistentHashPolicy,
    LongestMatchPolicy,
    PowerOfTwoPolicy,
    PrefixPolicy,
)
from router.placement.replica_view import NO_LOAD, ReplicaShape, ReplicaView
from router.placement.traffic import LATE_SHARE, MEMORY, Traffic

NUM_TOKENS = 4000


def candidate(
    replica_id: str = "a", hit: int = 0, queued: int = 0, running: int = 0, free: int = 9000, booked: int = 0
) -> Candidate:
    view = ReplicaView(replica_id, ReplicaShape(num_blocks=10_000))
    view.load = msgspec.structs.replace(
        NO_LOAD, num_queued_tokens=queued, num_running=running, num_free_blocks=free, num_blocks=10_000
    )
    if booked:
        view.book("r", booked, [])
    return Candidate(view, hit)


fields = st.tuples(
    st.integers(0, NUM_TOKENS),
    st.integers(0, 50_000),
    st.integers(0, 200),
    st.integers(0, 1000),
    st.integers(0, 9000),
)
crowds = st.lists(fields, min_size=1, max_size=9).map(
    lambda rows: [candidate(f"r{number}", *row) for number, row in enumerate(rows)]
)


@pytest.mark.parametrize("name", POLICIES)
@given(crowd=crowds, keys=st.lists(st.binary(max_size=4), min_size=1, max_size=4))
def test_a_ranking_has_every_candidate_once_and_changes_none(
    name: str, crowd: list[Candidate], keys: list[bytes]
) -> None:
    policy = POLICIES[name]()
    before = [(c.view.load, c.view.num_queued_tokens, c.num_hit_tokens) for c in crowd]

    for key in keys:
        ranked = policy.rank(crowd, NUM_TOKENS, key)

        assert Counter(id(one.candidate) for one in ranked) == Counter(map(id, crowd))
        assert all(0 < one.cost_s < float("inf") for one in ranked)
    assert [(c.view.load, c.view.num_queued_tokens, c.num_hit_tokens) for c in crowd] == before


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_to_choose_from_gives_an_empty_ranking(name: str) -> None:
    assert POLICIES[name]().rank([], NUM_TOKENS, b"") == []


@pytest.mark.parametrize("name", POLICIES)
@given(crowd=crowds)
def test_the_same_history_gives_the_same_ranking(name: str, crowd: list[Candidate]) -> None:
    one, other = POLICIES[name](), POLICIES[name]()

    for key in (b"a", b"b", b"c"):
        assert one.rank(crowd, NUM_TOKENS, key) == other.rank(crowd, NUM_TOKENS, key)


@given(row=fields, more=st.integers(1, 3000))
def test_a_start_is_no_later_with_more_cached_and_no_earlier_with_more_queued(
    row: tuple[int, int, int, int, int], more: int
) -> None:
    hit, queued, running, free, booked = row
    now = forecast(candidate("a", *row), NUM_TOKENS).start_s

    cached = candidate("a", min(hit + more, NUM_TOKENS), queued, running, free, booked)
    assert forecast(cached, NUM_TOKENS).start_s <= now + 1e-9
    assert forecast(candidate("a", hit, queued + more, running, free, booked), NUM_TOKENS).start_s >= now
    assert forecast(candidate("a", hit, queued, running, free, booked + more), NUM_TOKENS).start_s >= now
    fuller = candidate("a", hit, queued, running, max(0, free - more), booked)
    assert forecast(fuller, NUM_TOKENS).start_s >= now


def test_a_pool_without_free_blocks_costs_the_wait_for_some() -> None:
    full, roomy = forecast(candidate(free=0), NUM_TOKENS), forecast(candidate(free=9000), NUM_TOKENS)

    assert full.wait_s > roomy.wait_s
    assert full.work_s == roomy.work_s


def test_power_of_two_takes_the_emptier_of_a_random_pair() -> None:
    crowd = [candidate(f"r{i}", running=i) for i in range(8)]
    policy = PowerOfTwoPolicy(seed=3)

    firsts = Counter(policy.rank(crowd, NUM_TOKENS, b"")[0].candidate.view.num_sequences for _ in range(2000))

    assert firsts[7] == 0
    assert [firsts[i] / 2000 for i in range(7)] == pytest.approx([(7 - i) / 28 for i in range(7)], abs=0.03)


@given(crowd=crowds)
def test_longest_match_looks_at_nothing_before_the_match(crowd: list[Candidate]) -> None:
    ranked = LongestMatchPolicy().rank(crowd, NUM_TOKENS, b"")

    hits = [one.candidate.num_hit_tokens for one in ranked]
    assert hits == sorted(hits, reverse=True)


def test_consistent_hash_keeps_a_key_where_it_is_until_that_replica_has_too_much() -> None:
    policy = ConsistentHashPolicy()
    crowd = [candidate(f"r{i}", running=10) for i in range(4)]
    home = policy.rank(crowd, NUM_TOKENS, b"key")[0].candidate
    assert policy.rank(crowd[::-1], NUM_TOKENS, b"key")[0].candidate is home

    home.view.load = msgspec.structs.replace(home.view.load, num_running=20)

    assert policy.rank(crowd, NUM_TOKENS, b"key")[-1].candidate is home


def test_siblings_are_those_whose_leading_blocks_agree() -> None:
    hashes = [bytes([i]) * 16 for i in range(9)]

    assert sibling_key(hashes, []) == sibling_key(hashes[:5], [1])
    assert sibling_key(hashes[:2], []) != sibling_key(hashes, [])
    assert sibling_key([], [1, 2]) == sibling_key([], [1, 2]) != sibling_key([], [1, 3])


# What a prefix policy learns


def test_traffic_is_told_by_what_arrivals_find() -> None:
    traffic = Traffic()
    totals = (0, 0)
    for i in range(4 * MEMORY):
        totals = (totals[0] + 1000, totals[1] + 250)
        traffic.note(busy_share=i % 2, start_s=1.0, work_s=0.5, totals=totals)

    assert traffic.utilization == pytest.approx(0.5, abs=0.01)
    assert traffic.arrivals_per_s == pytest.approx(1.0, abs=0.02)
    assert traffic.hit_share == pytest.approx(0.25)
    assert traffic.hits_per_computed_token == pytest.approx(1 / 3)


def test_counters_that_begin_anew_are_passed_over() -> None:
    traffic = Traffic()
    for totals in ((1000, 500), (2000, 1000), (0, 0), (1000, 500)):
        traffic.note(0.5, 1.0, 0.5, totals)

    assert traffic.hit_share == pytest.approx(0.5)


def test_late_is_what_few_requests_are() -> None:
    traffic = Traffic()
    starts = [10.0 if i % 40 == 0 else i % 40 / 40 for i in range(40 * MEMORY)]
    for start in starts:
        traffic.note(0.5, start, 0.5, (0, 0))

    assert LATE_SHARE < 0.99
    assert 2.0 < traffic.late_s <= 10.2


def test_alike_requests_have_no_tail() -> None:
    traffic = Traffic()
    for _ in range(MEMORY):
        traffic.note(0.5, 1.0, 0.5, (0, 0))

    assert traffic.late_s == pytest.approx(4.0)


def test_a_long_request_stacks_up_rather_than_take_the_last_idle_replica() -> None:
    policy = PrefixPolicy()
    busy = [candidate(f"r{i}", queued=15_000) for i in range(3)]
    for _ in range(MEMORY):  # arrivals find three of four at work, most of the time
        policy.rank([*busy, candidate("r3", queued=9000)], NUM_TOKENS, b"")

    def queue_taken(num_tokens: int, *others: Candidate) -> int:
        return policy.rank([*busy[: 4 - len(others)], *others], num_tokens, b"")[
            0
        ].candidate.view.num_queued_tokens

    assert queue_taken(1000, candidate("r3")) == 0
    assert queue_taken(20_000, candidate("r3")) == 15_000
    assert queue_taken(20_000, candidate("r2"), candidate("r3")) == 0  # one more is left
    assert queue_taken(90_000, candidate("r3")) == 0  # it would be later than nearly all
