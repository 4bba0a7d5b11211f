"""All replicas of one model: their streams, what they hold, and where the next request goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.config import Limits, Timeouts
from router.explanation import Moved, Placement
from router.journal import Journal, Prompt
from router.last_chance import LastChance
from router.membership import Members, Membership
from router.placement.candidate import Ranked, make_candidate, session_key, sibling_key
from router.placement.policy import Policy
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import Predicted, ReplicaShape, ReplicaView
from router.queue_moves import QueueMoves, Sent
from router.replica_call import Connect, connect_by_grpc
from router.replica_stream import Recall, ReplicaStream, Sink
from router.tenancy.fair_line import FairLine
from workers.engine.errors import Overloaded, ReplicaLost, ShuttingDown

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PlacementCounts:
    """What placement has done since start; read by the metrics."""

    num_placed: int = 0
    num_tokens: int = 0
    """Prompt (and resumed output) tokens of placed requests."""
    num_hit_tokens: int = 0
    """Of those, predicted to be cached where they went."""
    num_resumed: int = 0
    """Placements of requests that had been at a replica before."""


class ReplicaSet:
    """Follows a membership group; places requests on its replicas and withdraws them."""

    def __init__(
        self,
        policy: Policy,
        index: PrefixIndex,
        limits: Limits,
        timeouts: Timeouts,
        wake: Callable[[], None] = lambda: None,
        recall: Recall = lambda request_id, tenant: b"",
        connect: Connect = connect_by_grpc,
    ) -> None:
        """``wake`` is called for each request that finds no replica, ``recall`` for what other ingresses ask."""
        self.index = index
        self.counts = PlacementCounts()
        self._policy = policy
        self._limits = limits
        self._timeouts = timeouts
        self._wake = wake
        self._recall = recall
        self._connect = connect
        self._group = ""
        self.membership_version = 0
        """Of the set of replicas that is followed now."""
        self._streams: dict[str, ReplicaStream] = {}
        self._retired: set[ReplicaStream] = set()
        self._sent: dict[str, Sent] = {}
        """Requests at replicas, by their ids there."""
        self.moves = QueueMoves(self._sent, self._all_streams, index, policy, self._send, self._may_move)
        self.num_held = 0
        """Requests that wait here: for any replica to be there, or for their caller's turn."""
        self._line: FairLine[asyncio.Future[None]] = FairLine()
        self._num_tokens_in_line = 0
        self._num_called = 0
        """Of those in line, called and not placed yet."""
        self._last_chance = LastChance()
        self._changed = asyncio.Event()
        self._has_stopped = False
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def streams(self) -> Sequence[ReplicaStream]:
        """The streams of all members, open or not."""
        return list(self._streams.values())

    @property
    def open_views(self) -> list[ReplicaView]:
        """Replicas that requests can be placed on."""
        return [s.view for s in self._streams.values() if s.view is not None and s.view.is_open]

    @property
    def num_placed(self) -> int:
        """Requests that are at replicas now."""
        return len(self._sent)

    def shapes(self) -> set[ReplicaShape]:
        """The kinds of replicas there are: usually one."""
        return {view.shape for view in self.open_views}

    def start(self, membership: Membership, group: str) -> None:
        """Follow ``group`` from now on, on the running loop."""
        self._group = group
        self._stop_listening = membership.listen(group, self._set_members)

    async def stop(self) -> None:
        """End all streams. Requests that are out, or wait here, end with ``ShuttingDown``. Safe to call twice."""
        self._has_stopped = True
        self._stop_listening()
        self.moves.stop()
        streams = self._all_streams()
        self._streams.clear()
        self._retired.clear()
        self._on_change()
        await asyncio.gather(*(stream.stop() for stream in streams))

    async def place_or_wait(self, journal: Journal, sink: Sink, arrival_s: float) -> None:
        """Place a request, waiting for its caller's turn, and for a replica to be there if none is.

        ``journal.replica_id`` says where it went.

        Raises:
            Overloaded: all replicas' queues are full, or the caller's share of those who wait for a turn is.
            ReplicaLost: no replica came within the time set, or the request has lost too many.
            ShuttingDown: nothing is placed here any more.
        """
        if journal.num_suspect_losses >= self._limits.max_lost_replicas:
            raise ReplicaLost(
                f"{journal.num_suspect_losses} replicas in a row broke before they had a token of this request "
                f"({', '.join(journal.lost_on[-journal.num_suspect_losses :])}): it is given up"
            )
        if len(journal.lost_on) >= self._limits.max_lost_in_all:
            raise ReplicaLost(f"{len(journal.lost_on)} replicas broke under this request: it is given up")
        self.num_held += 1
        is_called = is_placed = False
        try:
            if not journal.is_resumed:
                is_called = await self._wait_for_turn(journal)
            elif journal.num_suspect_losses == self._limits.max_lost_replicas - 1:
                await self._last_chance.enter(journal.engine_id)
            if not self.open_views:
                await self._wait_for_a_replica()
            if self._has_stopped:
                raise ShuttingDown("this endpoint is being stopped: send the request again")
            self.place(journal, sink, arrival_s)
            is_placed = True
        finally:
            if not is_placed:
                self._last_chance.leave(journal.engine_id)
            self.num_held -= 1
            self._num_called -= is_called
            if is_called:
                self._call()

    async def _wait_for_turn(self, journal: Journal) -> bool:
        """Return once the request may be placed; True if it was called from the line.

        Who is alone waits for nobody: replicas queue its requests themselves, where they are cached.
        """
        line, tenant = self._line, journal.prompt.terms.tenant
        is_contended = line.see(tenant, asyncio.get_running_loop().time())
        line.charge(tenant, len(journal.prompt), 0)
        if not is_contended or not (views := self.open_views):
            return False
        if not len(line) and any(view.has_room for view in views):
            return False
        capacity = self._limits.max_waiting_per_replica * len(views)
        if len(line) >= capacity and line.num_of(tenant) >= capacity / line.num_callers:
            raise Overloaded(f"{line.num_of(tenant)} requests of this caller wait already")
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.join(tenant, called)
        self._num_tokens_in_line += len(journal.prompt)
        try:
            await called
        except asyncio.CancelledError:
            if not line.leave(tenant, called) and not called.cancelled():
                # It was called in the very moment in which the client left.
                self._num_called -= 1
                self._call()
            raise
        finally:
            self._num_tokens_in_line -= len(journal.prompt)
        return True

    def _call(self) -> None:
        """Let as many go as replicas have room for; all of them where there is no replica, since none will step."""
        line, views = self._line, self.open_views
        num_free = sum(view.has_room for view in views) if views else len(line)
        while len(line) and self._num_called < num_free:
            called = line.pop()
            if not called.done():
                self._num_called += 1
                called.set_result(None)

    def _on_change(self) -> None:
        self._changed.set()
        self.moves.wake()
        self._call()
        self._clear_suspect()

    def _on_step(self) -> None:
        if len(self._line):
            self._call()
        self._clear_suspect()

    def _clear_suspect(self) -> None:
        """Let the next one have its last chance once the one before has a token or its replica is gone."""
        suspect = self._last_chance.engine_id
        if suspect is None or (sent := self._sent.get(suspect)) is None:
            return
        view = sent.stream.view
        if view is None or not view.is_booked(suspect):
            self._last_chance.leave(suspect)

    async def _wait_for_a_replica(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._timeouts.replica_wait_s
        while not self.open_views and not self._has_stopped:
            self._wake()
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                wait_s = self._timeouts.replica_wait_s
                raise ReplicaLost(f"no replica of the model has been available for {wait_s:g} s") from None

    def place(self, journal: Journal, sink: Sink, arrival_s: float) -> None:
        """Choose a replica, reserve it there, and send it.

        Raises:
            Overloaded: all queues are full (a request that was admitted before is placed nevertheless).
            ReplicaLost: no replica is open; nothing was sent.
        """
        views = self._admitting(journal)
        hashes_of = {shape: journal.hashes(shape) for shape in {view.shape for view in views}}
        candidates = [
            make_candidate(
                view,
                self.index,
                self._streams[view.replica_id].index_key,
                hashes_of[view.shape],
                journal.num_tokens,
            )
            for view in views
        ]
        key = _key(journal.prompt, views[0].shape)
        ranked = self._policy.rank(candidates, journal.num_tokens, key)
        best = ranked[0].candidate
        sent = Sent(journal, sink, arrival_s, self._streams[best.view.replica_id])
        self._send(sent, ranked)
        self.counts.num_placed += 1
        self.counts.num_tokens += journal.num_tokens
        self.counts.num_hit_tokens += best.num_hit_tokens
        self.counts.num_resumed += journal.is_resumed

    def _send(self, sent: Sent, ranked: Sequence[Ranked], moved: Moved | None = None) -> None:
        """Reserve a request's place at the first of a ranking, whose stream is ``sent.stream``, and send it.

        Raises:
            ReplicaLost: the stream is not open; nothing was sent.
        """
        journal, best = sent.journal, ranked[0].candidate
        view, now_s = best.view, asyncio.get_running_loop().time()
        hashes = journal.hashes(view.shape)
        num_held_tokens = self._num_tokens_in_line // max(1, len(self.open_views))
        request = journal.engine_request(view.shape, hashes, sent.arrival_s)
        sent.stream.submit(request, sent.sink, num_held_tokens)
        num_uncached = journal.num_tokens - best.num_hit_tokens
        predicted = Predicted(now_s, ranked[0].forecast.start_s)
        view.book(journal.engine_id, num_uncached, hashes, best.num_hit_tokens, predicted)
        self._sent[journal.engine_id] = sent
        journal.replica_id = view.replica_id
        journal.placements.append(Placement(now_s, ranked, self.membership_version, moved=moved))
        self.moves.watch()

    def withdraw(self, journal: Journal) -> None:
        """Forget a request: cancel it if it is still running. Safe to call twice."""
        sent = self._sent.pop(journal.engine_id, None)
        self._last_chance.leave(journal.engine_id)
        if sent is not None:
            self.moves.forget(journal.engine_id)
            sent.stream.cancel(journal.engine_id)
            num_new = len(journal.output_token_ids) - journal.num_charged_tokens
            journal.num_charged_tokens += num_new
            self._line.charge(journal.prompt.terms.tenant, 0, num_new)

    def _may_move(self, request_id: str) -> bool:
        """Those in line here are called by room at replicas, which moves must not take; a suspect stays apart."""
        return not len(self._line) and request_id != self._last_chance.engine_id

    def _all_streams(self) -> list[ReplicaStream]:
        return [*self._streams.values(), *self._retired]

    def _admitting(self, journal: Journal) -> list[ReplicaView]:
        """Replicas that may be asked to take this request; at least one."""
        views = self.open_views
        if not views:
            raise ReplicaLost("no replica of the model is available")
        # While a model is rolled out with another length, some replicas are too small for what others have begun.
        views = [v for v in views if v.shape.holds(journal.longest)] or views
        if journal.is_resumed:  # it was admitted once; better not where it was lost
            return [v for v in views if v.replica_id not in journal.lost_on] or views
        views = [v for v in views if v.num_waiting < self._limits.max_waiting_per_replica]
        if not views:
            raise Overloaded("all replicas' queues are full")
        return views

    def _set_members(self, members: Members, version: int) -> None:
        if version < self.membership_version:
            return
        self.membership_version = version
        for replica_id, stream in list(self._streams.items()):
            if members.get(replica_id) != stream.address:
                del self._streams[replica_id]
                self._retire(stream)
        for replica_id, address in members.items():
            if replica_id not in self._streams:
                stream = ReplicaStream(
                    replica_id,
                    address,
                    self.index,
                    self._timeouts,
                    self._on_change,
                    self.moves,
                    self._recall,
                    self._group,
                    self._connect,
                )
                stream.on_step = self._on_step
                self._streams[replica_id] = stream
                stream.start()
        self._on_change()

    def _retire(self, stream: ReplicaStream) -> None:
        self._retired = {s for s in self._retired if not s.has_ended}
        self._retired.add(stream)
        stream.retire()


def _key(prompt: Prompt, shape: ReplicaShape) -> bytes:
    """By which requests gather at one replica among equals."""
    session = prompt.terms.session
    return session_key(session) if session else sibling_key(prompt.hashes(shape), prompt.token_ids)
