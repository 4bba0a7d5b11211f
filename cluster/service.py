"""The gRPC side of a replica: one stream for each ingress, multiplexed over one brain.

Knows neither Ray nor the engine: commands go to a `Brain`, updates are handed to `on_update`. Each stream
has one reader (requests coming down) and one writer (its outbox going up); an ingress that goes away has
its requests cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import grpc

from cluster import wire
from cluster.outbox import Outbox, OutboxFull
from cluster.proto import shoal_pb2 as pb
from cluster.proto import shoal_pb2_grpc
from cluster.relay import Relay
from workers.brain_messages import CacheSnapshot, Load, QueueShown, StepUpdate, TokenOutput
from workers.engine.block_hash import HASH_BYTES
from workers.engine.errors import UserError
from workers.engine.request import EngineRequest, FinishReason

logger = logging.getLogger(__name__)


SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 << 20),  # a 1 M-token prompt is 4 MB, its hashes 1 MB
    ("grpc.max_send_message_length", 256 << 20),  # a snapshot of a million blocks is 16 MB
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),  # ingresses ping often, to tell a stopped replica from a quiet one
)


MAX_COMING_BLOCKS = 512
"""Of a request, as many are announced to other ingresses: 8 kB."""


class Brain(Protocol):
    """What the service asks of the brain process; calls return at once."""

    def submit(self, request: EngineRequest) -> None:
        """Take up a request; its outputs come as updates."""

    def cancel(self, request_ids: list[str]) -> None:
        """End requests; nothing further is reported of them."""

    def release(self, request_ids: list[str]) -> None:
        """Ask for requests back that have not begun; an update says of each whether it was given."""

    def show_queue(self, prefix: str, least_wait_s: float, most: int) -> None:
        """Ask for a ``QueueShown`` update."""

    def request_snapshot(self) -> None:
        """Ask for a ``CacheSnapshot`` update."""


class _Stream:
    """One attached ingress."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.outbox = Outbox()
        self.request_ids: set[str] = set()  # the ingress's own ids
        self.wants_snapshot = True
        self.is_too_slow = False
        self.num_held_tokens = 0  # that wait at the ingress, by its last message with a request

    def put(self, message: pb.ReplicaMessage) -> None:
        """Queue a message; an ingress too far behind is cut off instead."""
        try:
            self.outbox.put(message)
        except OutboxFull:
            self._cut_off()

    def put_step(
        self,
        outputs: list[pb.TokenOutput],
        cache: pb.CacheEvents | None,
        load: pb.Load,
        arrived: Sequence[int] = (),
        kept: Sequence[str] = (),
    ) -> None:
        """Queue a step, likewise."""
        try:
            self.outbox.put_step(outputs, cache, load, arrived, kept)
        except OutboxFull:
            self._cut_off()

    def _cut_off(self) -> None:
        self.is_too_slow = True
        self.outbox.close()

    @property
    def prefix(self) -> str:
        """Of its requests' ids in the brain, where those of two ingresses cannot meet."""
        return f"{self.number}/"

    def engine_id(self, request_id: str) -> str:
        """A request's id in the brain."""
        return self.prefix + request_id


class ReplicaService(shoal_pb2_grpc.ReplicaServicer):
    """Implements ``shoal.v1.Replica``."""

    def __init__(self, hello: pb.Hello, brain: Brain, initial_load: Load) -> None:
        self._hello = hello
        self._brain = brain
        self._streams: dict[int, _Stream] = {}
        self._owners: dict[str, tuple[_Stream, str]] = {}  # engine id -> stream, ingress's id
        self._relay = Relay()
        self._coming: dict[str, int] = {}  # engine id -> number under which the other ingresses know of it
        self._num_coming = 0
        self._num_attached = 0
        self._draining: pb.Draining | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.load = initial_load

    @property
    def num_requests(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._owners)

    @property
    def num_held_tokens(self) -> int:
        """Prompt tokens that wait at the ingresses until replicas have room, this replica's part."""
        return sum(stream.num_held_tokens for stream in self._streams.values())

    @property
    def num_streams(self) -> int:
        """Ingresses attached."""
        return len(self._streams)

    @property
    def num_questions(self) -> int:
        """Questions between ingresses that are open here."""
        return self._relay.num_open

    # -- gRPC ---------------------------------------------------------------------------------------------

    async def Attach(
        self, messages: AsyncIterator[pb.IngressMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ReplicaMessage]:
        """Serve one ingress until either side leaves."""
        self._num_attached += 1
        stream = _Stream(self._num_attached)
        stream.put(pb.ReplicaMessage(hello=self._hello))
        # An idle replica makes no steps: without its load now it would be judged by a guess of what steps cost.
        stream.put(pb.ReplicaMessage(step=pb.Step(load=wire.load_to_wire(self.load))))
        if self._draining is not None:
            stream.put(pb.ReplicaMessage(draining=self._draining))
        self._streams[stream.number] = stream
        self._brain.request_snapshot()
        reader = asyncio.create_task(self._read(stream, messages))
        try:
            while (message := await stream.outbox.get()) is not None:
                yield message
            if stream.is_too_slow:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "the ingress reads too slowly; attach anew"
                )
        finally:
            reader.cancel()
            self._detach(stream)
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stream: _Stream, messages: AsyncIterator[pb.IngressMessage]) -> None:
        try:
            async for message in messages:
                kind = message.WhichOneof("kind")
                if kind == "submit":
                    stream.num_held_tokens = message.num_held_tokens
                    self._submit(stream, message.submit)
                elif kind == "cancel":
                    self._cancel(stream, list(message.cancel.request_ids))
                elif kind == "release":
                    self._release(stream, message.release.request_ids)
                elif kind == "show_queue":
                    self._brain.show_queue(
                        stream.prefix, message.show_queue.least_wait_s, message.show_queue.most
                    )
                elif kind == "resync":
                    stream.wants_snapshot = True
                    self._brain.request_snapshot()
                elif kind == "question":
                    others = [one for one in self._streams.values() if one is not stream]
                    self._relay.ask(stream, message.question, others)
                elif kind == "answer":
                    self._relay.take(stream.number, message.answer)
        finally:
            stream.outbox.close()  # the ingress has closed its side: nothing more will be asked

    # -- requests -----------------------------------------------------------------------------------------

    def _submit(self, stream: _Stream, submit: pb.Submit) -> None:
        request_id = submit.request_id
        if request_id in stream.request_ids:
            logger.error("request %s was submitted twice; the second is ignored", request_id)
            return
        try:
            request = wire.request_from_wire(submit, stream.engine_id(request_id))
        except UserError as error:
            self._refuse(stream, request_id, error.message, error.param)
            return
        stream.request_ids.add(request_id)
        self._owners[request.request_id] = (stream, request_id)
        self._idle.clear()
        self._brain.submit(request)
        self._announce(stream, request.request_id, submit.block_hashes)

    def _announce(self, stream: _Stream, engine_id: str, block_hashes: bytes) -> None:
        """Tell the other ingresses which blocks are coming, so that they send siblings after them."""
        others = [one for one in self._streams.values() if one is not stream]
        if not others or not block_hashes:
            return
        self._num_coming += 1
        self._coming[engine_id] = self._num_coming
        first = block_hashes[: MAX_COMING_BLOCKS * HASH_BYTES]
        message = pb.ReplicaMessage(coming=pb.Coming(number=self._num_coming, block_hashes=first))
        for one in others:
            one.put(message)

    def _refuse(self, stream: _Stream, request_id: str, message: str, param: str | None) -> None:
        output = TokenOutput(
            request_id, [], FinishReason.ERROR, error=message, error_param=param, is_user_error=True
        )
        stream.put_step([wire.output_to_wire(output, request_id)], None, wire.load_to_wire(self.load))

    def _cancel(self, stream: _Stream, request_ids: list[str]) -> None:
        engine_ids = [
            stream.engine_id(request_id) for request_id in request_ids if request_id in stream.request_ids
        ]
        for engine_id in engine_ids:
            self._forget(engine_id)
        arrived = [self._coming.pop(engine_id) for engine_id in engine_ids if engine_id in self._coming]
        if arrived:
            load = wire.load_to_wire(self.load)
            for one in list(self._streams.values()):
                one.put_step([], None, load, arrived)
        if engine_ids:
            self._brain.cancel(engine_ids)

    def _release(self, stream: _Stream, request_ids: Iterable[str]) -> None:
        """Those that have ended, whose last output is under way, are no longer to be had."""
        known = [
            stream.engine_id(request_id) for request_id in request_ids if request_id in stream.request_ids
        ]
        if known:
            self._brain.release(known)

    def _forget(self, engine_id: str) -> None:
        stream, request_id = self._owners.pop(engine_id)
        stream.request_ids.discard(request_id)
        if not self._owners:
            self._idle.set()

    def _detach(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        self._relay.leave(stream.number)
        self._cancel(stream, list(stream.request_ids))

    # -- updates from the brain ---------------------------------------------------------------------------

    def on_update(self, update: StepUpdate | QueueShown | CacheSnapshot) -> None:
        """Fan an update out to the ingresses it concerns."""
        if isinstance(update, QueueShown):
            for stream in self._streams.values():
                if stream.prefix == update.prefix:
                    stream.put(pb.ReplicaMessage(queue=wire.queue_to_wire(update)))
            return
        if isinstance(update, CacheSnapshot):
            message = pb.ReplicaMessage(snapshot=wire.snapshot_to_wire(update))
            for stream in self._streams.values():
                if stream.wants_snapshot:
                    stream.wants_snapshot = False
                    stream.put(message)
            return
        self.load = update.load
        outputs: dict[int, list[pb.TokenOutput]] = {}
        arrived: list[int] = []
        for output in update.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # cancelled while this step ran
            stream, request_id = owner
            outputs.setdefault(stream.number, []).append(wire.output_to_wire(output, request_id))
            if output.request_id in self._coming:
                arrived.append(self._coming.pop(output.request_id))
            if output.finish_reason is not None:
                self._forget(output.request_id)
        kept: dict[int, list[str]] = {}
        for engine_id in update.kept:
            if (owner := self._owners.get(engine_id)) is not None:
                kept.setdefault(owner[0].number, []).append(owner[1])
        cache = wire.cache_events_to_wire(update.cache) if update.cache is not None else None
        load = wire.load_to_wire(update.load)
        for number, stream in list(self._streams.items()):
            stream.put_step(outputs.get(number, []), cache, load, arrived, kept.get(number, ()))

    # -- leaving ------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Tell the ingresses, finish what is here, then end the streams.

        Returns:
            True if all requests ended by themselves. Those cut off go on elsewhere, from their
            ingress's journal.
        """
        self._draining = pb.Draining(deadline_s=timeout_s)
        for stream in self._streams.values():
            stream.put(pb.ReplicaMessage(draining=self._draining))
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            finished = True
        except TimeoutError:
            finished = False
        for stream in list(self._streams.values()):
            stream.outbox.close()
        return finished


async def start_server(service: ReplicaService, host: str, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Listen for ingresses.

    Returns:
        The server and its port.

    Raises:
        OSError: the address cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    shoal_pb2_grpc.add_ReplicaServicer_to_server(service, server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    await server.start()
    return server, bound
