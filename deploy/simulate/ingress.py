"""One ingress's part of placement, in virtual time: the router's own index, views, bookings, policy and mover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.service import MAX_COMING_BLOCKS
from deploy.simulate.messages import Report, SimulatedRequest
from router.placement.candidate import Candidate, Forecast, make_candidate, sibling_key
from router.placement.moving import MAX_MOVES, MAX_SHOWN, Move, Mover
from router.placement.policy import Policy
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import Predicted, ReplicaShape, ReplicaView
from workers.engine.outputs import Queued


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went, what of it was thought to be cached there, and when it was thought to start."""

    replica: int
    num_hit_tokens: int
    forecast: Forecast


@dataclass(slots=True)
class _Waiting:
    """A request that has had no token yet."""

    request: SimulatedRequest
    been: list[ReplicaView] = field(default_factory=list)
    """Where it is, and was before."""


class SimulatedIngress:
    """Places requests and reads reports as ``router.replica_set.ReplicaSet`` and its streams do."""

    def __init__(self, policy: Policy, shape: ReplicaShape, num_replicas: int) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self._shape = shape
        self._mover = Mover(policy.costs_s) if policy.costs_s is not None else None
        self._waiting: dict[str, _Waiting] = {}
        self.views = [ReplicaView(_name(number), shape) for number in range(num_replicas)]
        self._numbers = {view.replica_id: number for number, view in enumerate(self.views)}
        for number in range(num_replicas):
            self.renew(number)

    @property
    def has_waiting(self) -> bool:
        """True while a request has had no token yet."""
        return bool(self._waiting)

    def renew(self, replica: int) -> None:
        """A fresh replica stands in this place."""
        self.views[replica] = ReplicaView(_name(replica), self._shape)
        for _ in self.index.load_snapshot(_name(replica), 0, b""):
            pass

    def wake(self) -> None:
        """Replicas have come or gone."""
        if self._mover is not None:
            self._mover.wake()

    def place(self, request: SimulatedRequest, now_s: float) -> Placement:
        """Choose a replica for a request and book it there."""
        traced = request.traced
        hashes, num_tokens = traced.hashes, traced.num_prompt_tokens
        candidates = [
            make_candidate(view, self.index, view.replica_id, hashes, num_tokens)
            for view in self.views
            if view.is_open
        ]
        key = sibling_key(hashes, [request.number])
        best, _, forecast = self.policy.rank(candidates, num_tokens, key)[0]
        self._waiting[request.request_id] = _Waiting(request)
        return self._book(best, forecast, request, now_s)

    def drop(self, replica: int, request: SimulatedRequest) -> None:
        """A request is no longer at a replica, which refused it or is gone."""
        self._waiting.pop(request.request_id, None)
        self.views[replica].settle(request.request_id)

    def hear_coming(self, replica: int, request: SimulatedRequest) -> None:
        """A request of another ingress has been taken up by a replica."""
        self.views[replica].note_coming(request.request_id, request.traced.hashes[:MAX_COMING_BLOCKS])

    def hear_gone(self, replica: int, request: SimulatedRequest) -> None:
        """A request of another ingress has left a replica that had not begun it."""
        self.views[replica].note_arrived(request.request_id)

    def hear(self, replica: int, report: Report, now_s: float) -> None:
        """Take in what a replica says after a step."""
        view = self.views[replica]
        view.apply_load(report.load)
        for begun in report.begun:
            predicted = view.settle(begun.request_id)
            if predicted is not None and self._mover is not None:
                self._mover.error.note(predicted.start_s, now_s - predicted.at_s)
            self._waiting.pop(begun.request_id, None)
            view.note_arrived(begun.request_id)
        events = report.events
        if events is not None:
            is_in_order = self.index.apply(
                view.replica_id,
                events.first_sequence,
                b"".join(events.stored),
                b"".join(events.evicted),
                b"".join(events.offloaded),
            )
            assert is_in_order, f"events of {view.replica_id} are missing"

    def check(self) -> None:
        """Raise ``AssertionError`` if index or views disagree with themselves."""
        self.index.check()
        for view in self.views:
            view.check()

    # Moving, as ``router.queue_moves.QueueMoves`` does

    def sources(self, now_s: float) -> list[tuple[int, float]]:
        """Replicas whose queues are worth a look, and the wait from which on a request may gain."""
        found = self._mover.sources(self.views, now_s) if self._mover is not None else []
        return [(self._numbers[view.replica_id], least_wait_s) for view, least_wait_s in found]

    def choose(self, replica: int, queued: Sequence[Queued]) -> list[Move]:
        """Who of those in line at a replica moves."""
        own = [one for one in queued if one.request_id in self._waiting]
        assert self._mover is not None, "it named no sources"
        return self._mover.choose(self.views[replica], own[:MAX_SHOWN], self.views, self)

    def move(self, move: Move, now_s: float) -> tuple[SimulatedRequest, Placement]:
        """A request has been given back: where it is to be sent, booked there."""
        request = self._waiting[move.request_id].request
        move.source.settle(move.request_id)
        return request, self._book(move.target, move.there, request, now_s)

    def cancel(self, move: Move) -> None:
        """The request had begun: it stays."""
        move.target.view.settle(_booked_name(move.request_id))

    def num_movable_tokens(self, request_id: str) -> int:
        """See ``MovingSide``."""
        waiting = self._waiting[request_id]
        return waiting.request.traced.num_prompt_tokens if len(waiting.been) <= MAX_MOVES else 0

    def candidate(self, request_id: str, target: ReplicaView) -> Candidate | None:
        """See ``MovingSide``."""
        waiting = self._waiting[request_id]
        if any(view is target for view in waiting.been):
            return None
        traced = waiting.request.traced
        return make_candidate(target, self.index, target.replica_id, traced.hashes, traced.num_prompt_tokens)

    def book(self, move: Move) -> None:
        """See ``MovingSide``."""
        traced, target = self._waiting[move.request_id].request.traced, move.target
        num_uncached = traced.num_prompt_tokens - target.num_hit_tokens
        name = _booked_name(move.request_id)
        target.view.book(name, num_uncached, traced.hashes, target.num_hit_tokens)

    def _book(
        self, best: Candidate, forecast: Forecast, request: SimulatedRequest, now_s: float
    ) -> Placement:
        view, name, hashes = best.view, request.request_id, request.traced.hashes
        num_uncached = request.traced.num_prompt_tokens - best.num_hit_tokens
        predicted = Predicted(now_s, forecast.start_s)
        view.settle(_booked_name(name))
        view.book(name, num_uncached, hashes, best.num_hit_tokens, predicted)
        self._waiting[name].been.append(view)
        return Placement(self._numbers[view.replica_id], best.num_hit_tokens, forecast)


def _name(replica: int) -> str:
    return f"replica-{replica:04}"


def _booked_name(request_id: str) -> str:
    """Of a request's place at the replica that it is to move to."""
    return request_id + "'"
