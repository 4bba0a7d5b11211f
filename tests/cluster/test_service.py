"""The gRPC side of a replica, over a real socket, before a brain that only notes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cluster import wire
from cluster.proto import shoal_pb2 as pb
from cluster.proto import shoal_pb2_grpc
from cluster.service import ReplicaService, start_server
from workers.brain_messages import (
    CacheEvents,
    CacheSnapshot,
    Load,
    Queued,
    QueueShown,
    StepUpdate,
    TokenOutput,
)
from workers.engine.cost_model import CostModel
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason

LOAD = Load(0, 0, 0, 8, 8, 0, 0.0, 0, 0, 0, 0, 0, CostModel())


class NotingBrain:
    """Remembers commands and lets a test wait for them."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[EngineRequest] = asyncio.Queue()
        self.cancelled: asyncio.Queue[list[str]] = asyncio.Queue()
        self.released: asyncio.Queue[list[str]] = asyncio.Queue()
        self.service: ReplicaService | None = None

    def submit(self, request: EngineRequest) -> None:
        self.submitted.put_nowait(request)

    def cancel(self, request_ids: list[str]) -> None:
        self.cancelled.put_nowait(request_ids)

    def release(self, request_ids: list[str]) -> None:
        self.released.put_nowait(request_ids)

    def show_queue(self, prefix: str, least_wait_s: float, most: int) -> None:
        assert self.service is not None
        queued = [Queued(prefix + "a", 5, 70, 900, 3)][:most]
        asyncio.get_running_loop().call_soon(self.service.on_update, QueueShown(prefix, queued))

    def request_snapshot(self) -> None:
        assert self.service is not None
        asyncio.get_running_loop().call_soon(self.service.on_update, CacheSnapshot(3, [b"h" * 16]))


class Peer:
    """An ingress, as far as the wire shows."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.call = shoal_pb2_grpc.ReplicaStub(self.channel).Attach()

    async def send(self, **kind: Any) -> None:
        await self.call.write(pb.IngressMessage(**kind))

    async def submit(self, request_id: str) -> None:
        request = EngineRequest(request_id, [1, 2, 3], ChoiceParams(max_tokens=4))
        await self.send(submit=wire.request_to_wire(request))

    async def read(self, kind: str) -> Any:
        while True:
            message = await asyncio.wait_for(self.call.read(), 10)
            assert message is not grpc.aio.EOF, f"the stream ended before a {kind}"
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)

    async def outputs(self) -> Any:
        """Of the next step that has any."""
        while not (outputs := (await self.read("step")).outputs):
            pass
        return outputs


@asynccontextmanager
async def replica() -> AsyncIterator[tuple[ReplicaService, NotingBrain, str]]:
    brain = NotingBrain()
    service = ReplicaService(pb.Hello(replica_id="r", block_size=16), brain, LOAD)
    brain.service = service
    server, port = await start_server(service, "127.0.0.1")
    try:
        yield service, brain, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def step(*outputs: TokenOutput, cache: CacheEvents | None = None) -> StepUpdate:
    return StepUpdate(list(outputs), cache, LOAD)


async def test_an_ingress_is_greeted_and_given_the_cache() -> None:
    async with replica() as (_, _, address):
        peer = Peer(address)

        assert (await peer.read("hello")).replica_id == "r"
        snapshot = await peer.read("snapshot")

        assert (snapshot.next_sequence, snapshot.hashes) == (3, b"h" * 16)
        await peer.channel.close()


async def test_an_ingress_learns_the_load_of_an_idle_replica_at_once() -> None:
    async with replica() as (service, _, address):
        service.load = Load(0, 0, 0, 5, 8, 0, 0.0, 0, 0, 0, 0, 0, CostModel(base_s=0.5))
        peer = Peer(address)

        load = (await peer.read("step")).load

        assert (load.num_free_blocks, load.base_s) == (5, 0.5)
        await peer.channel.close()


async def test_each_ingress_gets_its_own_tokens_under_its_own_ids() -> None:
    async with replica() as (service, brain, address):
        one, two = Peer(address), Peer(address)
        await one.submit("same id")
        first = await brain.submitted.get()
        await two.submit("same id")
        second = await brain.submitted.get()
        assert first.request_id != second.request_id

        service.on_update(step(TokenOutput(first.request_id, [7]), TokenOutput(second.request_id, [8])))

        for peer, token_id in ((one, 7), (two, 8)):
            outputs = await peer.outputs()
            assert [(output.request_id, list(output.token_ids)) for output in outputs] == [
                ("same id", [token_id])
            ]
            await peer.channel.close()


async def test_an_ingress_that_goes_away_has_its_requests_cancelled_and_no_others() -> None:
    async with replica() as (service, brain, address):
        leaver, stayer = Peer(address), Peer(address)
        await leaver.submit("a")
        left = await brain.submitted.get()
        await stayer.submit("b")
        await brain.submitted.get()

        await leaver.channel.close()

        assert await asyncio.wait_for(brain.cancelled.get(), 10) == [left.request_id]
        assert service.num_requests == 1
        await stayer.channel.close()


async def test_a_cancelled_request_is_forgotten_at_once() -> None:
    async with replica() as (service, brain, address):
        peer = Peer(address)
        await peer.submit("a")
        request = await brain.submitted.get()

        await peer.send(cancel=pb.Cancel(request_ids=["a", "never heard of"]))

        assert await brain.cancelled.get() == [request.request_id]
        assert service.num_requests == 0
        service.on_update(step(TokenOutput(request.request_id, [9])))  # of a step that ran meanwhile
        await peer.channel.close()


async def test_a_malformed_request_is_answered_and_the_stream_goes_on() -> None:
    async with replica() as (_, brain, address):
        peer = Peer(address)
        bad = wire.request_to_wire(EngineRequest("bad", [1], ChoiceParams(max_tokens=1)))
        bad.params.temperature = float("inf")

        await peer.send(submit=bad)
        output = (await peer.outputs())[0]
        await peer.submit("good")

        assert (output.request_id, output.error_param, output.is_user_error) == ("bad", "temperature", True)
        assert (await brain.submitted.get()).prompt_token_ids == [1, 2, 3]
        await peer.channel.close()


async def test_draining_waits_for_requests_and_then_ends_the_streams() -> None:
    async with replica() as (service, brain, address):
        peer = Peer(address)
        await peer.submit("a")
        request = await brain.submitted.get()
        draining = asyncio.ensure_future(service.drain(timeout_s=10))
        assert (await peer.read("draining")).deadline_s == 10

        service.on_update(step(TokenOutput(request.request_id, [7], FinishReason.LENGTH)))

        assert await draining is True
        assert (await peer.outputs())[0].finish_reason == "length"
        assert await peer.call.read() is grpc.aio.EOF


async def test_a_drain_out_of_time_ends_the_streams_of_unfinished_requests() -> None:
    async with replica() as (service, brain, address):
        peer = Peer(address)
        await peer.submit("a")
        await brain.submitted.get()

        assert await service.drain(timeout_s=0.01) is False

        with pytest.raises(AssertionError, match="the stream ended"):
            await peer.outputs()


async def test_what_waits_at_ingresses_is_known_until_they_leave() -> None:
    async with replica() as (service, brain, address):
        peers = [Peer(address), Peer(address)]
        for peer, num_tokens in zip(peers, (700, 50), strict=True):
            request = EngineRequest("a", [1], ChoiceParams(max_tokens=4))
            await peer.send(submit=wire.request_to_wire(request), num_held_tokens=num_tokens)
            await brain.submitted.get()
        assert service.num_held_tokens == 750

        await peers[0].channel.close()
        await brain.cancelled.get()
        assert service.num_held_tokens == 50
        await peers[1].channel.close()


async def test_an_ingress_asks_back_what_is_its_own_and_hears_of_each() -> None:
    async with replica() as (service, brain, address):
        peer, other = Peer(address), Peer(address)
        for one, request_id in ((peer, "a"), (peer, "b"), (other, "c")):
            await one.submit(request_id)
        engine_ids = [(await brain.submitted.get()).request_id for _ in range(3)]
        owners = {engine_id.split("/")[1]: engine_id for engine_id in engine_ids}

        await peer.send(release=pb.Release(request_ids=["a", "b", "c", "ended meanwhile"]))

        assert await brain.released.get() == [owners["a"], owners["b"]]
        released = TokenOutput(owners["a"], [], FinishReason.RELEASED)
        service.on_update(StepUpdate([released], None, LOAD, kept=[owners["b"], "gone meanwhile"]))
        while not (step := await peer.read("step")).outputs:
            pass
        assert [(one.request_id, one.finish_reason) for one in step.outputs] == [("a", "released")]
        assert step.kept == ["b"]
        assert service.num_requests == 2
        await peer.channel.close()
        await other.channel.close()


async def test_an_ingress_is_shown_the_queue_under_its_own_ids() -> None:
    async with replica() as (_, _, address):
        peer = Peer(address)

        await peer.send(show_queue=pb.ShowQueue(least_wait_s=0.5, most=4))
        queue = await peer.read("queue")

        assert wire.queue_from_wire(queue) == [Queued("a", 5, 70, 900, 3)]
        await peer.channel.close()
