"""One ingress's part of placement, in virtual time: the router's own index, views, bookings and policy."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.service import MAX_COMING_BLOCKS
from deploy.simulate.messages import Report, SimulatedRequest
from router.placement.candidate import Forecast, make_candidate, sibling_key
from router.placement.policy import Policy
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import ReplicaShape, ReplicaView


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went, what of it was thought to be cached there, and when it was thought to start."""

    replica: int
    num_hit_tokens: int
    forecast: Forecast


class SimulatedIngress:
    """Places requests and reads reports as ``router.replica_set.ReplicaSet`` and its streams do."""

    def __init__(self, policy: Policy, shape: ReplicaShape, num_replicas: int) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self._shape = shape
        self.views = [ReplicaView(_name(number), shape) for number in range(num_replicas)]
        self._numbers = {view.replica_id: number for number, view in enumerate(self.views)}
        for number in range(num_replicas):
            self.renew(number)

    def renew(self, replica: int) -> None:
        """A fresh replica stands in this place."""
        self.views[replica] = ReplicaView(_name(replica), self._shape)
        for _ in self.index.load_snapshot(_name(replica), 0, b""):
            pass

    def place(self, request: SimulatedRequest) -> Placement:
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
        num_uncached = num_tokens - best.num_hit_tokens
        best.view.book(request.request_id, num_uncached, hashes, best.num_hit_tokens)
        return Placement(self._numbers[best.view.replica_id], best.num_hit_tokens, forecast)

    def hear_coming(self, replica: int, request: SimulatedRequest) -> None:
        """A request of another ingress has been taken up by a replica."""
        self.views[replica].note_coming(request.request_id, request.traced.hashes[:MAX_COMING_BLOCKS])

    def hear(self, replica: int, report: Report) -> None:
        """Take in what a replica says after a step."""
        view = self.views[replica]
        view.apply_load(report.load)
        for begun in report.begun:
            view.settle(begun.request_id)
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


def _name(replica: int) -> str:
    return f"replica-{replica:04}"
