"""Which queued requests move: the decision by itself, on loads that are set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.placement.candidate import Candidate, Forecast
from router.placement.moving import (
    LONGEST_PERIOD_S,
    MOVES_AT_ONCE,
    PERIOD_S,
    ForecastError,
    Move,
    Mover,
)
from router.placement.replica_view import NO_LOAD, ReplicaShape, ReplicaView
from workers.engine.cost_model import CostModel
from workers.engine.outputs import Queued

TOKENS = 1000
COST = CostModel(base_s=0.01, per_sequence_s=0.0, per_token_s=1e-4)
"""A prompt of ``TOKENS`` takes 0.1 s."""
SHAPE = ReplicaShape(max_num_seqs=8, max_num_batched_tokens=2 * TOKENS, num_blocks=10_000)


def view(name: str, num_waiting: int = 0, num_running: int = 0) -> ReplicaView:
    """A replica with so many prompts in its queue, one of them of this ingress."""
    made = ReplicaView(name, SHAPE)
    made.apply_load(
        replace_load(num_waiting=num_waiting, num_running=num_running, num_queued_tokens=TOKENS * num_waiting)
    )
    if num_waiting:
        made.book("r0", 0, [])
        made.apply_load(made.load)
        made.apply_load(made.load)
    return made


def replace_load(**fields: int):
    values = {name: getattr(NO_LOAD, name) for name in NO_LOAD.__struct_fields__}
    return type(NO_LOAD)(
        **{**values, "num_blocks": 10_000, "num_free_blocks": 10_000, "cost": COST, **fields}
    )


def line(num_requests: int) -> list[Queued]:
    """Requests r0, r1, ... behind one another."""
    return [Queued(f"r{n}", TOKENS, TOKENS * n, TOKENS * TOKENS // 2 * n, n) for n in range(num_requests)]


@dataclass
class Side:
    """An ingress all of whose requests may go anywhere, with nothing cached."""

    hit_tokens: dict[str, int] = field(default_factory=dict)
    """By replica."""
    stay: Sequence[str] = ()
    booked: list[Move] = field(default_factory=list)

    def num_movable_tokens(self, request_id: str) -> int:
        return 0 if request_id in self.stay else TOKENS

    def candidate(self, request_id: str, target: ReplicaView) -> Candidate | None:
        return Candidate(target, self.hit_tokens.get(target.replica_id, 0))

    def book(self, move: Move) -> None:
        self.booked.append(move)
        target = move.target
        target.view.book(move.request_id + "'", TOKENS - target.num_hit_tokens, [])


def starts(forecasts: Sequence[Forecast], num_replicas: int) -> list[float]:
    """A policy that looks at nothing but the request's own start."""
    return [one.start_s for one in forecasts]


def certain() -> Mover:
    """Forecasts have been right so far."""
    mover = Mover(starts)
    mover.error.note(1.0, 1.0)
    return mover


def names(moves: Sequence[Move]) -> list[tuple[str, str]]:
    return [(move.request_id, move.target.view.replica_id) for move in moves]


def test_every_other_request_goes_to_a_replica_that_stands_idle() -> None:
    busy, idle = view("busy", num_waiting=5), view("idle")

    moves = certain().choose(busy, line(5), [busy, idle], Side())

    # The first starts at once where it is, the second at once there, and so on, until the idle one has no room.
    assert names(moves) == [("r1", "idle"), ("r3", "idle")]
    assert [round(move.gain_s, 3) for move in moves] == [0.1, 0.11]


def test_nobody_moves_to_a_replica_without_room() -> None:
    busy, other = view("busy", num_waiting=50), view("other", num_waiting=4)

    assert not certain().sources([busy, other], 0.0)
    assert not certain().choose(busy, line(50), [busy, other], Side())


def test_a_move_must_gain_more_than_forecasts_err_by() -> None:
    busy, idle = view("busy", num_waiting=3), view("idle")
    wrong = Mover(starts)
    wrong.error.note(0.1, 1.0)

    assert names(certain().choose(busy, line(3)[1:2], [busy, idle], Side()))
    assert not wrong.choose(busy, line(3)[1:2], [busy, view("idle")], Side())


def test_what_a_move_costs_the_others_counts_against_it() -> None:
    """Though the request would gain by computing again what is cached where it waits."""

    def selfless(forecasts: Sequence[Forecast], num_replicas: int) -> list[float]:
        assert num_replicas == 2
        return [one.start_s + one.work_s for one in forecasts]

    mover = Mover(selfless)
    mover.error.note(1.0, 1.0)
    busy = view("busy", num_waiting=3)
    cached_here = [Queued("r0", 10, 1800, 0, 2)]

    assert certain().choose(busy, cached_here, [busy, view("idle")], Side())
    assert not mover.choose(busy, cached_here, [busy, view("idle")], Side())
    assert mover.choose(busy, cached_here, [busy, view("idle")], Side({"idle": 900}))


def test_the_replica_that_starts_it_soonest_is_taken() -> None:
    busy, cold, warm = view("busy", num_waiting=5), view("cold"), view("warm", num_waiting=1)

    moves = certain().choose(busy, line(5)[2:], [busy, cold, warm], Side({"warm": 990}))

    assert names(moves) == [("r2", "cold"), ("r3", "warm"), ("r4", "warm")]


def test_those_behind_one_that_leaves_are_closer_to_their_turn() -> None:
    busy, idle = view("busy", num_waiting=4), view("idle")

    moves = certain().choose(busy, line(4), [busy, idle], Side())

    assert "r2" not in dict(names(moves)), "its turn comes as soon as r1 has left"


def test_only_a_few_move_at_a_time_however_much_room_there_is() -> None:
    busy, idle = view("busy", num_waiting=100), view("idle")
    idle.shape = replace(SHAPE, max_num_seqs=1000, max_num_batched_tokens=1_000_000)

    moves = certain().choose(busy, line(100), [busy, idle], Side())

    assert len(moves) == MOVES_AT_ONCE


def test_who_may_not_move_stays() -> None:
    busy, idle = view("busy", num_waiting=4), view("idle")

    moves = certain().choose(busy, line(4), [busy, idle], Side(stay=["r1"]))

    assert "r1" not in dict(names(moves))
    assert "r2" in dict(names(moves))


def test_a_request_without_a_seat_moves_though_little_is_to_be_computed_before_it() -> None:
    busy, idle = view("busy", num_waiting=1, num_running=8), view("idle")
    waiting = [Queued("r0", TOKENS, 0, 0, 8)]

    assert names(certain().choose(busy, waiting, [busy, idle], Side())) == [("r0", "idle")]


def test_a_draining_replica_gets_nobody_and_its_queue_is_looked_at() -> None:
    busy, draining = view("busy", num_waiting=5), view("draining", num_waiting=2)
    draining.is_open = False
    idle = view("idle")

    assert not certain().choose(busy, line(5), [busy, draining], Side())
    sources = certain().sources([draining, idle], 0.0)
    assert [source.replica_id for source, _ in sources] == ["draining"]


def test_queues_are_not_looked_at_while_nobody_would_gain() -> None:
    nobody_else, as_busy = [view("busy", num_waiting=3)], [view("a", num_waiting=1), view("b", num_waiting=1)]
    not_ours = view("busy", num_waiting=9)
    not_ours.clear_bookings()

    for views in (nobody_else, as_busy, [not_ours, view("idle")]):
        assert not certain().sources(views, 0.0)


def test_looks_that_find_nobody_become_rare_until_a_replica_comes() -> None:
    mover = certain()
    views = [view("busy", num_waiting=9), view("idle")]
    looked_s = []
    now_s = 0.0
    while now_s < 5.0:
        if mover.sources(views, now_s):
            looked_s.append(now_s)
        now_s += PERIOD_S / 2

    assert len(looked_s) < 12
    assert looked_s[-1] - looked_s[-2] >= LONGEST_PERIOD_S

    mover.wake()
    assert mover.sources(views, now_s)


def test_after_a_move_the_queue_is_looked_at_again_at_once() -> None:
    mover = certain()
    busy, idle = view("busy", num_waiting=9), view("idle")
    assert mover.sources([busy, idle], 0.0)

    assert mover.choose(busy, line(9), [busy, idle], Side())

    assert mover.sources([busy, view("idle")], PERIOD_S / 2)


def test_the_forecasts_error_is_a_share_in_which_long_waits_count_more() -> None:
    error = ForecastError()
    assert error.share == 0.25
    error.note(10.0, 9.0)
    error.note(0.01, 0.03)

    assert 0.09 < error.share < 0.11
    for _ in range(2000):
        error.note(1.0, 2.0)
    assert 0.49 < error.share <= 0.5


def test_however_wrong_forecasts_are_an_idle_replica_relieves_a_queue() -> None:
    mover = Mover(starts)
    for _ in range(100):
        mover.error.note(1.0, 0.001)
    busy, idle = view("busy", num_waiting=9), view("idle")

    assert mover.choose(busy, line(9), [busy, idle], Side())
