"""One bidirectional gRPC stream to one replica, shared by all of this ingress's requests there.

Tasks: a reader, which deals outputs out to their requests; ONE writer, since concurrent writes break a
grpc.aio stream; a watchdog, which ends the stream when no step comes while work of ours is there. When a
stream ends, its requests hear of it, and it is opened again with growing pauses while the replica is a member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from cluster.config import application_name
from cluster.proto import shoal_pb2 as pb
from cluster.wire import load_from_wire, queue_from_wire, request_to_wire, split_hashes
from router.config import Timeouts
from router.journal import Loss
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import Predicted, ReplicaShape, ReplicaView
from router.replica_call import Call, Connect, connect_by_grpc
from workers.engine.errors import ReplicaLost
from workers.engine.outputs import Queued
from workers.engine.request import EngineRequest, FinishReason

log = logging.getLogger(__name__)

_MANY_FAILURES = 16
"""After which the pause before the next attempt is the longest."""


Recall = Callable[[str, str], bytes]
"""What is known of a request (id, tenant) here, as JSON; empty: nothing."""


def _nothing_known(request_id: str, tenant: str) -> bytes:
    return b""


class Sink(Protocol):
    """Who a request's outputs go to. Called on the event loop; must not block or raise."""

    def on_output(self, output: pb.TokenOutput) -> None:
        """Take new tokens; an output with a finish reason is the last."""
        ...

    def on_loss(self, loss: Loss) -> None:
        """Nothing more will come: the stream has ended."""
        ...


class QueueListener(Protocol):
    """Who cares for requests in line. Called on the event loop; must not block or raise."""

    def on_queue(self, stream: ReplicaStream, queued: Sequence[Queued]) -> None:
        """What the replica's queue looks like, as asked."""
        ...

    def on_released(self, request_id: str) -> None:
        """The replica has given a request back; its sink hears nothing of it."""
        ...

    def on_kept(self, request_id: str) -> None:
        """A request that was asked back has begun, and stays."""
        ...

    def on_begun(self, predicted: Predicted) -> None:
        """A request of which this was predicted has its first output."""
        ...


class ReplicaStream:
    """The stream to one replica at one address. ``view`` is None while it is not open."""

    def __init__(
        self,
        replica_id: str,
        address: str,
        index: PrefixIndex,
        timeouts: Timeouts,
        on_change: Callable[[], None],
        queue_listener: QueueListener,
        recall: Recall = _nothing_known,
        group: str = "",
        connect: Connect = connect_by_grpc,
    ) -> None:
        """``recall`` answers other ingresses' questions about requests.

        ``group`` is the membership group whose model it must serve: a replica of another one may have come to have
        the address of one that is gone. Empty: any.
        """
        self.replica_id = replica_id
        self.address = address
        self.index_key = f"{replica_id}@{address}"
        """Its name in the prefix index: a replica that comes back elsewhere starts afresh."""
        self.view: ReplicaView | None = None
        self.on_step: Callable[[], None] = lambda: None
        """Called after each step's news have been taken in."""
        self.num_losses = 0
        """Times that an open stream ended."""
        self._index = index
        self._timeouts = timeouts
        self._on_change = on_change
        self._queue_listener = queue_listener
        self._recall = recall
        self._group = group
        self._connect = connect
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._num_questions = 0
        self._sinks: dict[str, Sink] = {}
        self._outgoing: asyncio.Queue[pb.IngressMessage] = asyncio.Queue()
        self._progress_s = 0.0
        self._num_failures = 0
        self._is_retired = False
        self._is_draining = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """True if requests may be placed here."""
        return self.view is not None and self.view.is_open

    @property
    def has_ended(self) -> bool:
        """True once it will never be open again."""
        return self._task is not None and self._task.done()

    @property
    def num_requests(self) -> int:
        """Requests of ours that are there."""
        return len(self._sinks)

    def start(self) -> None:
        """Begin to connect, on the running loop."""
        self._task = asyncio.create_task(self._run(), name=f"replica-stream-{self.replica_id}")

    async def stop(self) -> None:
        """End the stream; its requests are told that it is lost. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def retire(self) -> None:
        """The replica has left the membership: no new requests; end when those here have."""
        self._is_retired = True
        if self.view is not None:
            self.view.is_open = False
        self._end_if_idle()
        self._on_change()

    def submit(self, request: EngineRequest, sink: Sink, num_held_tokens: int = 0) -> None:
        """Send a request; ``sink`` hears of it from now on.

        ``num_held_tokens`` are prompt tokens that wait here, this replica's part: what the autoscaler is to know of.

        Raises:
            ReplicaLost: the stream is not open; nothing was sent.
        """
        if not self.is_open:
            raise ReplicaLost(f"replica {self.replica_id} takes no requests")
        if not self._sinks:
            self._progress_s = self._now()
        self._sinks[request.request_id] = sink
        self._outgoing.put_nowait(
            pb.IngressMessage(submit=request_to_wire(request), num_held_tokens=num_held_tokens)
        )

    def cancel(self, request_id: str) -> None:
        """End a request; its sink hears nothing more. Unknown ids are ignored."""
        if self._sinks.pop(request_id, None) is None:
            return
        if self.view is not None:
            self.view.settle(request_id)
        self._outgoing.put_nowait(pb.IngressMessage(cancel=pb.Cancel(request_ids=[request_id])))
        self._end_if_idle()

    def show_queue(self, least_wait_s: float, most: int) -> None:
        """Ask who waits there, of those before whom so much work stands; the listener hears of it."""
        self._outgoing.put_nowait(
            pb.IngressMessage(show_queue=pb.ShowQueue(least_wait_s=least_wait_s, most=most))
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Ask requests back that have not begun; the listener hears of each, unless it ends first."""
        self._outgoing.put_nowait(pb.IngressMessage(release=pb.Release(request_ids=request_ids)))

    async def ask(self, request_id: str, tenant: str) -> bytes:
        """What the other ingresses of the replica know of a request of ``tenant``; empty: nothing."""
        self._num_questions += 1
        number = self._num_questions
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        question = pb.Question(id=number, request_id=request_id, tenant=tenant)
        self._outgoing.put_nowait(pb.IngressMessage(question=question))
        try:
            return await answer
        finally:
            del self._questions[number]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._sinks and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            reason = "the ingress stops"
            try:
                reason = await self._attach()
            finally:
                self._lose(reason)
            if self._is_retired:
                return
            pause_s = self._timeouts.reconnect_first_s * 2 ** min(self._num_failures, _MANY_FAILURES)
            self._num_failures += 1
            await asyncio.sleep(min(pause_s, self._timeouts.reconnect_most_s))

    async def _attach(self) -> str:
        """Hold one stream open as long as it lasts; return why it ended."""
        async with self._connect(self.address, self._timeouts) as call:
            self._outgoing = asyncio.Queue()
            tasks = [
                asyncio.create_task(self._read(call)),
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._watch()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return next(_reason(task) for task in tasks if task.done())
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Call) -> str:
        try:
            hello = await asyncio.wait_for(call.read(), self._timeouts.connect_s)
        except TimeoutError:
            return f"no Hello within {self._timeouts.connect_s} s"
        if hello is grpc.aio.EOF:
            return "the replica ended the stream"
        if not hello.HasField("hello"):
            return "the replica's first message is not a Hello"
        model = hello.hello.model
        if self._group and application_name(model) != self._group:
            self._num_failures = _MANY_FAILURES
            return f"it serves {model!r}, another model"
        self._open(hello.hello)
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                return "the replica ended the stream"
            kind = message.WhichOneof("kind")
            if kind == "step":
                self._take_step(message.step)
            elif kind == "snapshot":
                snapshot = message.snapshot
                parts = self._index.load_snapshot(
                    self.index_key, snapshot.next_sequence, snapshot.hashes, snapshot.host_hashes
                )
                for _ in parts:
                    await asyncio.sleep(0)
            elif kind == "draining":
                self._drain(message.draining.deadline_s)
            elif kind == "coming" and self.view is not None:
                self.view.note_coming(message.coming.number, split_hashes(message.coming.block_hashes))
            elif kind == "queue":
                self._queue_listener.on_queue(self, queue_from_wire(message.queue))
            elif kind == "question":
                asked = message.question
                answer = pb.Answer(id=asked.id, body=self._recall(asked.request_id, asked.tenant))
                self._outgoing.put_nowait(pb.IngressMessage(answer=answer))
            elif kind == "answer":
                self._hear(message.answer.id, message.answer.body)

    async def _write(self, call: Call) -> str:
        while True:
            await call.write(await self._outgoing.get())

    async def _watch(self) -> str:
        stall_s = self._timeouts.stall_s
        while True:
            await asyncio.sleep(stall_s / 4)
            idle_s = self._now() - self._progress_s
            if self._sinks and idle_s > stall_s:
                self._num_failures = (
                    _MANY_FAILURES  # it would take new requests and stall again: the longest pause
                )
                return f"no step for {idle_s:.1f} s with {len(self._sinks)} requests there"

    def _open(self, hello: pb.Hello) -> None:
        self._progress_s = self._now()
        self._is_draining = False
        self._index.await_snapshot(self.index_key)
        self.view = ReplicaView(self.replica_id, _shape(hello))
        self.view.is_open = not self._is_retired
        log.info("replica %s: stream to %s is open", self.replica_id, self.address)
        self._on_change()

    def _drain(self, deadline_s: float) -> None:
        self._is_draining = True
        if self.view is not None:
            self.view.is_open = False
        log.info("replica %s drains: %d requests, %.1f s", self.replica_id, len(self._sinks), deadline_s)
        self._on_change()

    def _take_step(self, step: pb.Step) -> None:
        view, sinks = self.view, self._sinks
        assert view is not None, "a step came before Hello"
        self._progress_s = self._now()
        self._num_failures = 0
        if step.HasField("load"):
            view.apply_load(load_from_wire(step.load))
        for number in step.arrived:
            view.note_arrived(number)
        for output in step.outputs:
            request_id = output.request_id
            if view.num_booked and (predicted := view.settle(request_id)) is not None and output.token_ids:
                self._queue_listener.on_begun(predicted)
            sink = sinks.get(request_id)
            if sink is None:  # cancelled meanwhile
                continue
            if output.finish_reason:
                del sinks[request_id]
                if output.finish_reason == FinishReason.RELEASED:
                    self._queue_listener.on_released(request_id)
                    continue
            sink.on_output(output)
        for request_id in step.kept:
            self._queue_listener.on_kept(request_id)
        if step.HasField("cache"):
            cache = step.cache
            is_in_order = self._index.apply(
                self.index_key, cache.first_sequence, cache.stored, cache.evicted, cache.offloaded
            )
            if not is_in_order:
                log.warning("replica %s: cache events are missing, asking for a snapshot", self.replica_id)
                self._outgoing.put_nowait(pb.IngressMessage(resync=pb.Resync()))
        self.on_step()
        if self._is_retired:
            self._end_if_idle()

    def _hear(self, number: int, body: bytes) -> None:
        answer = self._questions.get(number)
        if answer is not None and not answer.done():
            answer.set_result(body)

    def _lose(self, reason: str) -> None:
        """Forget what was known of the replica, then tell the requests that were there."""
        was_open, self.view = self.view is not None, None
        sinks, self._sinks = self._sinks, {}
        loss = Loss.CUT_OFF if self._is_draining else Loss.BROKEN
        self._index.remove(self.index_key)
        for number in self._questions:
            self._hear(number, b"")
        if was_open:
            self.num_losses += 1
            if sinks:
                log.warning(
                    "replica %s is lost with %d requests there: %s", self.replica_id, len(sinks), reason
                )
            self._on_change()
        for sink in sinks.values():
            sink.on_loss(loss)


def _shape(hello: pb.Hello) -> ReplicaShape:
    return ReplicaShape(
        block_size=hello.block_size,
        max_num_seqs=hello.max_num_seqs,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        num_blocks=hello.num_blocks,
        max_model_len=hello.max_model_len,
        hash_root=hello.hash_root,
    )


def _reason(task: asyncio.Task[str]) -> str:
    """Why a task of the stream ended, in words."""
    if task.cancelled():
        return "the call was cancelled"
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, asyncio.InvalidStateError):
        return "the call has ended"
    log.error("a task of a replica stream failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
