"""How many replicas a model gets: each figure alone, growth at once, shrinking one by one."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling import ReplicaDemand, ScaleTargets, WorkPolicy, demands_of, wanted_replicas

TARGETS = ScaleTargets(ttft_s=2.0, tpot_s=0.1)
BUSY = ReplicaDemand(queued_work_s=0.6, work_share=0.6, num_requests=9)


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (ReplicaDemand(queued_work_s=3.0, num_requests=1), 6),  # 1 s of queue a replica is half of 2 s
        (ReplicaDemand(work_share=0.95, num_requests=1), 3),
        (ReplicaDemand(room_share=0.98, num_requests=1), 3),
        (ReplicaDemand(step_s=0.15, step_base_s=0.01, num_requests=1), 4),  # twice the batch for 0.8 x 0.1 s
        (
            ReplicaDemand(step_s=0.04, prefill_share=0.8, num_requests=1),
            3,
        ),  # 0.04 s of steps in a fifth of the time
    ],
    ids=["wait", "work", "room", "pace", "pace-beside-prefill"],
)
def test_the_figure_beyond_its_bound_says_how_many_would_do(demand: ReplicaDemand, wanted: int) -> None:
    assert wanted_replicas([demand, demand], TARGETS, num_target=2) == wanted


def test_two_replicas_within_their_bounds_stay_two() -> None:
    assert wanted_replicas([BUSY, BUSY], TARGETS, num_target=2) == 2


def test_a_step_whose_constant_part_is_too_long_is_nothing_that_replicas_help_with() -> None:
    slow = ReplicaDemand(step_s=0.3, step_base_s=0.2, work_share=0.5, num_requests=1)

    assert wanted_replicas([slow], TARGETS, num_target=1) == 1


def test_no_more_are_asked_for_while_those_that_start_will_do() -> None:
    assert wanted_replicas([ReplicaDemand(queued_work_s=3.0, num_requests=5)], TARGETS, num_target=3) == 3


def test_a_light_load_gives_one_replica_back_at_a_time() -> None:
    light = ReplicaDemand(work_share=0.1, num_requests=1)

    assert wanted_replicas([light] * 5, TARGETS, num_target=5) == 4


def test_none_is_given_back_if_the_rest_would_be_near_their_bounds() -> None:
    demand = ReplicaDemand(work_share=0.5, num_requests=1)  # two would be at 0.75 of 0.85

    assert wanted_replicas([demand] * 3, TARGETS, num_target=3) == 3


def test_only_an_idle_last_replica_may_go() -> None:
    assert wanted_replicas([ReplicaDemand()], TARGETS, num_target=1) == 0
    assert wanted_replicas([ReplicaDemand(num_requests=1)], TARGETS, num_target=1) == 1


def test_a_moment_between_two_requests_is_no_rest() -> None:
    assert wanted_replicas([ReplicaDemand(work_share=0.3)], TARGETS, num_target=1) == 1
    assert wanted_replicas([ReplicaDemand(work_share=0.6)] * 2, TARGETS, num_target=2) == 2


def test_silence_changes_nothing() -> None:
    assert wanted_replicas([], TARGETS, num_target=3) == 3


SHARES = st.floats(0, 20, allow_nan=False)


@given(
    st.builds(
        ReplicaDemand,
        queued_work_s=SHARES,
        step_s=SHARES,
        work_share=SHARES,
        prefill_share=st.floats(0, 1),
        room_share=st.floats(0, 1),
        num_requests=st.integers(1, 200),
    ),
    st.integers(1, 50),
)
def test_what_has_grown_by_the_figures_is_not_given_back_at_once(demand: ReplicaDemand, count: int) -> None:
    """Load that spreads over the replicas that were asked for is a load at which none is given back."""
    wanted = wanted_replicas([demand] * count, TARGETS, num_target=count)
    if wanted <= count:
        return
    share = count / wanted
    spread = ReplicaDemand(**{name: value * share for name, value in asdict(demand).items()})

    assert wanted_replicas([spread] * wanted, TARGETS, num_target=wanted) in (wanted, wanted + 1)


def test_the_policy_reads_what_serve_collects() -> None:
    metrics = {
        "queued_work_s": {"a": 3.0, "b": 3.0},
        "num_requests": {"a": 4.0, "b": 4.0},
        "other": {"a": 1.0},
    }
    policy = pickle.loads(pickle.dumps(WorkPolicy(ttft_s=2.0)))

    wanted, _ = policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2))

    assert wanted == 6
    assert demands_of(metrics)[0] == ReplicaDemand(queued_work_s=3.0, num_requests=4.0)
