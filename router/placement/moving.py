"""Which queued requests move to another replica: one has room for them, and would start them clearly sooner.

A request is placed when it comes, by a forecast. While it waits, a replica may join, come back, or empty sooner than
was forecast. It then takes requests from the queues of the others, a few at a time and the first in line first, as
long as it has room: what moves is computed soon, so nothing is sent back and forth, and several ingresses that see
the same idle replica see each other's requests there before they send more.

A move must promise a gain beyond what forecasts of this traffic err by (``ForecastError``), for the request and by
the policy's costs for all: what is cached where it waits is computed again elsewhere, and a long prompt that takes
the last idle replica is in everybody's way.

Pure: time comes in as an argument, sending and booking is the caller's (``MovingSide``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import inf
from typing import Protocol

from router.placement.candidate import Ahead, Candidate, Forecast, forecast
from router.placement.policy import Costs
from router.placement.replica_view import ReplicaView
from workers.engine.outputs import Queued

LEAST_GAIN_S = 0.02
"""What a move must gain at least: taking back and sending take some 3 ms, and nobody notices less than this."""
MAX_MOVES = 3
"""Of one request, never to a replica where it has been."""
MOVES_AT_ONCE = 8
"""To one replica, before its load shows them: other ingresses send there too."""
MAX_PLACES = 16
"""Replicas that are weighed for a request, the least busy ones."""
MAX_SHOWN = 64
"""Queued requests that a replica tells of at a time."""
PERIOD_S = 0.05
"""Between two looks at a replica's queue; each costs the brain some 0.1 ms."""
LONGEST_PERIOD_S = 1.0
"""Where looks have found nothing to move, the period doubles up to this."""


class ForecastError:
    """By what share forecasts have missed, long ones counting more: mean error over mean time, of the last starts."""

    MEMORY = 256
    """Starts over which is averaged; the first ones count by their number."""
    MOST = 0.75
    """Where forecasts are worse, as where outputs are far shorter than guessed, they still tell a queue from none."""

    def __init__(self) -> None:
        self._error_s = 0.0
        self._start_s = 0.0
        self._num_starts = 0

    @property
    def share(self) -> float:
        """0 to ``MOST``; a quarter before the first start."""
        return min(self._error_s / self._start_s, self.MOST) if self._start_s else 0.25

    def note(self, predicted_s: float, actual_s: float) -> None:
        """A request has started after ``actual_s``."""
        self._num_starts += 1
        rate = 1 / min(self._num_starts, self.MEMORY)
        self._error_s += rate * (abs(predicted_s - actual_s) - self._error_s)
        self._start_s += rate * (max(predicted_s, actual_s) - self._start_s)


@dataclass(frozen=True, slots=True)
class Move:
    """A request that is to change replicas."""

    request_id: str
    source: ReplicaView
    target: Candidate
    stay: Forecast
    """When it would start where it is."""
    there: Forecast

    @property
    def gain_s(self) -> float:
        """By how much sooner it starts."""
        return self.stay.start_s - self.there.start_s


class MovingSide(Protocol):
    """What an ingress knows of its requests."""

    def num_movable_tokens(self, request_id: str) -> int:
        """Known tokens of a request that may move now; 0: it may not, or is gone."""
        ...

    def candidate(self, request_id: str, target: ReplicaView) -> Candidate | None:
        """The target as a place for it; None: it may not go there."""
        ...

    def book(self, move: Move) -> None:
        """Take up a move: reserve its place, so that the next one sees it."""
        ...


class Mover:
    """Says which queues are worth a look, and who moves."""

    def __init__(self, costs_s: Costs) -> None:
        """``costs_s`` is the policy's way of weighing forecasts."""
        self.error = ForecastError()
        self._costs_s = costs_s
        self._looks: dict[str, tuple[float, float]] = {}
        """Replicas that were looked at: when next, and the period."""

    def wake(self) -> None:
        """Replicas have come, gone or come back: look at all queues again."""
        self._looks.clear()

    def sources(self, views: Sequence[ReplicaView], now_s: float) -> list[tuple[ReplicaView, float]]:
        """Replicas whose queues are worth a look now, and the wait from which on a request may gain."""
        waits = [(view, _wait_s(view)) for view in views if view.num_booked and self._is_due(view, now_s)]
        waits = [(view, wait_s) for view, wait_s in waits if wait_s > self._margin_s(wait_s)]
        if not waits:
            return []
        least_s = _least_wait_s(views)
        found = []
        for view, wait_s in waits:
            if wait_s - least_s > self._margin_s(wait_s):
                self._note_look(view, now_s)
                found.append((view, least_s + LEAST_GAIN_S))
        return found

    def choose(
        self,
        source: ReplicaView,
        queued: Sequence[Queued],
        views: Iterable[ReplicaView],
        side: MovingSide,
    ) -> list[Move]:
        """Who of ``queued``, in line at ``source``, moves where; ``side`` has booked each.

        Those behind one that moves are closer to their turn.
        """
        open_views = [view for view in views if view is not source and view.is_open]
        places = nsmallest(MAX_PLACES, open_views, key=_wait_s)
        counts: Counter[str] = Counter()
        moves: list[Move] = []
        num_tokens_left = num_attended_left = 0
        for one in queued:
            targets = [p for p in places if counts[p.replica_id] < MOVES_AT_ONCE and p.has_room]
            if not targets:
                break
            ahead = Ahead(
                max(0, one.num_tokens_ahead - num_tokens_left),
                max(0, one.num_attended_ahead - num_attended_left),
                one.num_requests_ahead - len(moves),
            )
            move = self._best_move(source, one, ahead, places, targets, len(open_views) + 1, side)
            if move is None:
                continue
            side.book(move)
            moves.append(move)
            counts[move.target.view.replica_id] += 1
            num_tokens_left += one.num_uncached_tokens
            num_attended_left += one.num_uncached_tokens * one.num_uncached_tokens // 2
        if moves:
            self._looks.pop(source.replica_id, None)
        return moves

    def _best_move(
        self,
        source: ReplicaView,
        one: Queued,
        ahead: Ahead,
        places: Sequence[ReplicaView],
        targets: Sequence[ReplicaView],
        num_replicas: int,
        side: MovingSide,
    ) -> Move | None:
        num_tokens = side.num_movable_tokens(one.request_id)
        if not num_tokens:
            return None
        num_cached = max(0, num_tokens - one.num_uncached_tokens)
        stay = forecast(Candidate(source, num_cached), num_tokens, ahead)
        candidates = [c for place in places if (c := side.candidate(one.request_id, place)) is not None]
        forecasts = [forecast(candidate, num_tokens) for candidate in candidates]
        stay_cost_s, *costs_s = self._costs_s([stay, *forecasts], num_replicas)
        found = [
            (cost_s, number) for number, cost_s in enumerate(costs_s) if candidates[number].view in targets
        ]
        if not found:
            return None
        cost_s, number = min(found)
        move = Move(one.request_id, source, candidates[number], stay, forecasts[number])
        margin_s = self._margin_s(stay.start_s)
        return move if min(move.gain_s, stay_cost_s - cost_s) > margin_s else None

    def _margin_s(self, start_s: float) -> float:
        return LEAST_GAIN_S + self.error.share * start_s

    def _is_due(self, view: ReplicaView, now_s: float) -> bool:
        due = self._looks.get(view.replica_id)
        return due is None or now_s >= due[0]

    def _note_look(self, view: ReplicaView, now_s: float) -> None:
        _, period_s = self._looks.get(view.replica_id, (0.0, PERIOD_S))
        self._looks[view.replica_id] = (now_s + period_s, min(2 * period_s, LONGEST_PERIOD_S))


def _least_wait_s(views: Iterable[ReplicaView]) -> float:
    """Until a new request would have its turn where that is soonest, of all replicas with room; none has: infinite."""
    least_s = inf
    for view in views:
        if view.is_open and view.has_room:
            least_s = min(least_s, _wait_s(view))
            if not least_s:
                break
    return least_s


def _wait_s(view: ReplicaView) -> float:
    """Until a new request of one token would have its turn there."""
    return forecast(Candidate(view, 0), 1).wait_s
