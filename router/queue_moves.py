"""Queued requests on their way from one replica of a model to another: who decides is ``router.placement.moving``.

While a request of this ingress waits anywhere, replicas are looked at every ``PERIOD_S``:

    somebody has room, and a queue elsewhere is long    ShowQueue to that queue's replica, which answers with a Queue
    who gains moves: its new place is booked            Release to the old replica
    it answers "released", nothing was computed         the request is sent to its new place, under a new id
    or "kept", it has begun                             the request stays, the booking is dropped

Until the answer the request is the old replica's: whatever it says, or its end, counts. From the answer on it is
the new one's. So each request is at one replica at any time, whoever dies or leaves meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.explanation import Moved
from router.journal import Journal, Loss
from router.placement.candidate import Candidate, Ranked, make_candidate
from router.placement.moving import MAX_MOVES, MAX_SHOWN, PERIOD_S, Move, Mover
from router.placement.policy import Policy
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import Predicted, ReplicaView
from router.replica_stream import ReplicaStream, Sink
from workers.engine.outputs import Queued


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that is at a replica."""

    journal: Journal
    sink: Sink
    arrival_s: float
    stream: ReplicaStream


@dataclass(frozen=True, slots=True)
class _UnderWay:
    move: Move
    booked_id: str
    """Its name at the new replica."""
    reason: str


REASONS = ("room", "joined", "draining")
"""Why requests move, see ``Moved.reason``."""
OUTCOMES = ("moved", "kept", "target_gone", "ended")
"""What became of a move; ``kept``: it had begun; ``target_gone``: its new replica took no more meanwhile, and it was
placed anew; ``ended``: its client left or its old replica was lost."""
Send = Callable[[Sent, list[Ranked], Moved], None]
"""Sends a request to the first of a ranking."""


class QueueMoves:
    """The moves of one model's requests at this ingress."""

    def __init__(
        self,
        sent: dict[str, Sent],
        streams: Callable[[], Iterable[ReplicaStream]],
        index: PrefixIndex,
        policy: Policy,
        send: Send,
        may_move: Callable[[str], bool],
    ) -> None:
        """
        Args:
            sent: requests at replicas by their ids there, this ingress's own record.
            streams: all that there are, draining ones included.
            index: which replica holds which blocks.
            policy: by which requests were placed; one without costs lets nobody move.
            send: called for each request that has been given back.
            may_move: asked of each request.
        """
        self.counts: Counter[tuple[str, str]] = Counter()
        """Moves by reason and outcome."""
        self._mover = Mover(policy.costs_s) if policy.costs_s is not None else None
        self._sent = sent
        self._streams = streams
        self._index = index
        self._send = send
        self._may_move = may_move
        self._under_way: dict[str, _UnderWay] = {}
        self._places: dict[ReplicaView, ReplicaStream] = {}
        """Replicas that are weighed now."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_under_way(self) -> int:
        """Requests that were asked back, without an answer yet."""
        return len(self._under_way)

    def watch(self) -> None:
        """A request has been sent: look after it until it has begun."""
        if self._timer is None and self._mover is not None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.look)

    def wake(self) -> None:
        """Replicas have come or gone: queues that held nobody who would gain may do so now."""
        if self._mover is not None:
            self._mover.wake()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def forget(self, request_id: str) -> None:
        """A request is no longer at its old replica, or has ended there. Unknown ids are ignored."""
        self._end(request_id, "ended")

    def on_queue(self, stream: ReplicaStream, queued: Sequence[Queued]) -> None:
        """See ``QueueListener``."""
        if stream.view is None or self._mover is None:
            return
        self._places = self._open_places()
        moves = self._mover.choose(stream.view, queued, list(self._places), self)
        if moves:
            stream.release([move.request_id for move in moves])

    def on_released(self, request_id: str) -> None:
        """See ``QueueListener``."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        under_way = self._under_way[request_id]
        move, target = under_way.move, under_way.move.target.view
        stream = self._open_places().get(target)
        if stream is None:
            self._end(request_id, "target_gone")
            sent.sink.on_loss(Loss.TARGET_GONE)
            return
        self._end(request_id, "moved")
        sent.journal.note_move()
        source = Candidate(move.source, 0)
        ranked = [
            Ranked(move.target, move.there.start_s, move.there),
            Ranked(source, move.stay.start_s, move.stay),
        ]
        there = Sent(sent.journal, sent.sink, sent.arrival_s, stream)
        self._send(there, ranked, Moved(under_way.reason, move.stay))

    def on_kept(self, request_id: str) -> None:
        """See ``QueueListener``."""
        self._end(request_id, "kept")

    def on_begun(self, predicted: Predicted) -> None:
        """See ``QueueListener``."""
        if self._mover is not None:
            self._mover.error.note(predicted.start_s, asyncio.get_running_loop().time() - predicted.at_s)

    # What the mover asks (``MovingSide``)

    def num_movable_tokens(self, request_id: str) -> int:
        """See ``MovingSide``."""
        sent = self._sent.get(request_id)
        if sent is None or request_id in self._under_way or len(sent.journal.moves) >= MAX_MOVES:
            return 0
        return sent.journal.num_tokens if self._may_move(request_id) else 0

    def candidate(self, request_id: str, target: ReplicaView) -> Candidate | None:
        """See ``MovingSide``."""
        journal = self._sent[request_id].journal
        if target.replica_id in journal.lost_on or not target.shape.holds(journal.longest):
            return None
        if any(placement.ranked[0].candidate.view is target for placement in journal.placements):
            return None
        hashes = journal.hashes(target.shape)
        index_key = self._places[target].index_key
        return make_candidate(target, self._index, index_key, hashes, journal.num_tokens)

    def book(self, move: Move) -> None:
        """See ``MovingSide``."""
        journal, target = self._sent[move.request_id].journal, move.target
        num_uncached = journal.num_tokens - target.num_hit_tokens
        hashes = journal.hashes(target.view.shape)
        target.view.book(journal.next_engine_id, num_uncached, hashes, target.num_hit_tokens)
        self._under_way[move.request_id] = _UnderWay(move, journal.next_engine_id, _reason(move, journal))

    # Looking

    def look(self) -> None:
        """Ask replicas with long queues for them, if there is room elsewhere; again after a while, if anybody waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        streams = {stream.view: stream for stream in self._streams() if stream.view is not None}
        if self._mover is None or not any(view.num_booked for view in streams):
            return
        self.watch()
        now_s = asyncio.get_running_loop().time()
        for view, least_wait_s in self._mover.sources(list(streams), now_s):
            streams[view].show_queue(least_wait_s, MAX_SHOWN)

    def _open_places(self) -> dict[ReplicaView, ReplicaStream]:
        return {
            stream.view: stream for stream in self._streams() if stream.view is not None and stream.is_open
        }

    def _end(self, request_id: str, outcome: str) -> None:
        """A move is over: its new place is booked no longer."""
        under_way = self._under_way.pop(request_id, None)
        if under_way is not None:
            under_way.move.target.view.settle(under_way.booked_id)
            self.counts[under_way.reason, outcome] += 1


def _reason(move: Move, journal: Journal) -> str:
    """Why it is to leave: see ``Moved``."""
    if not move.source.is_open:
        return "draining"
    first = next(one for one in reversed(journal.placements) if one.moved is None)
    was_there = any(ranked.candidate.view is move.target.view for ranked in first.ranked)
    return "room" if was_there else "joined"
