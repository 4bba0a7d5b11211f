"""Whatever steps, dies, comes back or leaves while requests move: each is answered once, by a replica that had it.

Real ingresses and real engines in one process, joined by queues instead of sockets, on a clock that steps drive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.proto import shoal_pb2 as pb
from cluster.service import ReplicaService
from router.config import Limits, Timeouts
from router.generation import Generation, TextParams
from router.journal import Prompt
from router.membership import Membership
from router.placement.policy import PrefixPolicy
from router.placement.prefix_index import PrefixIndex
from router.replica_set import ReplicaSet
from router.text.tokenizer import Tokenizer
from workers.brain_messages import QueueShown, StepUpdate, TokenOutput
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.engine import Engine
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason
from workers.scripted_rank import ScriptedRank, generate

VOCAB_SIZE = 256
STEP_S = 0.1
CONFIG = EngineConfig(
    max_model_len=64,
    num_blocks=48,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    vocab_size=VOCAB_SIZE,
    run_ahead=1,
)


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its clock stands still but for ``now_s``; timers fire when that has passed."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class Replica:
    """An engine behind the service that ingresses attach to; it steps when told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = Engine(CONFIG, CostModel(base_s=STEP_S, per_token_s=0.01))
        self.rank = ScriptedRank(CONFIG, VOCAB_SIZE)
        hello = pb.Hello(
            replica_id=name,
            block_size=CONFIG.block_size,
            max_model_len=CONFIG.max_model_len,
            num_blocks=CONFIG.num_blocks,
            max_num_seqs=CONFIG.max_num_seqs,
            max_num_batched_tokens=CONFIG.max_num_batched_tokens,
        )
        self.service = ReplicaService(hello, self, self.engine.load())
        self.finished: set[str] = set()
        """Requests that it has answered to their end, by the ingresses' ids."""
        self.ids: set[str] = set()
        """Requests that are here."""
        self.calls: set[MemoryCall] = set()
        self.is_alive = True

    def step(self) -> None:
        if self.is_alive:
            while (plan := self.engine.plan(0.0)) is not None:
                self.rank.launch(plan)
            if self.engine.num_launched:
                outputs = self.engine.apply(self.rank.collect(), 0.0)
                self._tell(outputs)

    def _tell(self, outputs: list[TokenOutput], kept: list[str] | None = None) -> None:
        self.engine.check()
        for output in outputs:
            if output.finish_reason is not None:
                self.ids.discard(output.request_id)
                if output.finish_reason is not FinishReason.RELEASED:
                    self.finished.add(output.request_id.split("/", 1)[1])
        events = self.engine.drain_cache_events()
        self.service.on_update(StepUpdate(outputs, events, self.engine.load(), kept or []))

    def submit(self, request: EngineRequest) -> None:
        output = self.engine.add(request, 0.0)
        self.ids.add(request.request_id)
        if output is not None:
            self._tell([output])

    def cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.ids.discard(request_id)
            self.engine.abort(request_id)
        self._tell([])

    def release(self, request_ids: list[str]) -> None:
        given = [request_id for request_id in request_ids if self.engine.release(request_id)]
        kept = [request_id for request_id in request_ids if request_id not in given]
        self._tell([TokenOutput(request_id, [], FinishReason.RELEASED) for request_id in given], kept)

    def show_queue(self, prefix: str, least_wait_s: float, most: int) -> None:
        self.service.on_update(QueueShown(prefix, self.engine.queued(prefix, least_wait_s, most)))

    def request_snapshot(self) -> None:
        self.service.on_update(self.engine.cache_snapshot())


class MemoryCall:
    """A stream without a socket."""

    def __init__(self, replica: Replica) -> None:
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        self._replica = replica
        replica.calls.add(self)
        self._server = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async for message in self._replica.service.Attach(self._messages(), None):  # type: ignore[arg-type]
                self._up.put_nowait(message)
        finally:
            self._up.put_nowait(grpc.aio.EOF)

    async def _messages(self) -> AsyncIterator[pb.IngressMessage]:
        while True:
            yield await self._down.get()

    async def read(self) -> Any:
        return await self._up.get()

    async def write(self, message: pb.IngressMessage) -> None:
        self._down.put_nowait(message)

    def cancel(self) -> None:
        self._replica.calls.discard(self)
        self._server.cancel()


@dataclass
class World:
    """Two ingresses, replicas that come and go, and clients."""

    loop: SteppedLoop
    table: Any
    replicas: dict[str, Replica] = field(default_factory=dict)
    """By address; dead ones too."""
    membership: Membership = field(default_factory=Membership)
    ingresses: list[ReplicaSet] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    clients: list[asyncio.Task[None]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    async def start(self) -> None:
        for _ in range(2):
            timeouts = Timeouts(reconnect_first_s=STEP_S, reconnect_most_s=STEP_S, replica_wait_s=1e6)
            limits = Limits(max_lost_replicas=1000, max_lost_in_all=1000)
            ingress = ReplicaSet(PrefixPolicy(), PrefixIndex(), limits, timeouts, connect=self.connect)
            ingress.start(self.membership, "")
            self.ingresses.append(ingress)
        self.join()
        self.join()
        await self.settle()

    @asynccontextmanager
    async def connect(self, address: str, timeouts: Timeouts) -> AsyncIterator[MemoryCall]:
        replica = self.replicas[address]
        if not replica.is_alive:
            raise OSError("connection refused")
        yield MemoryCall(replica)

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.is_alive]

    def join(self) -> None:
        if len(self.alive) < 3:
            name = f"replica-{len(self.replicas)}"
            self.replicas[name] = Replica(name)
            self._publish()

    def kill(self, number: int) -> None:
        """A replica's streams break; it is still a member for a while."""
        if len(self.alive) > 1:
            replica = self.alive[number % len(self.alive)]
            replica.is_alive = False
            for call in list(replica.calls):
                call.cancel()

    def cut(self, number: int) -> None:
        """One stream breaks; its ingress attaches anew, to the same replica."""
        calls = list(self.alive[number % len(self.alive)].calls)
        if calls:
            calls[0].cancel()

    def take_away(self, number: int) -> None:
        """A replica leaves the membership: it finishes what it has."""
        if len(self.alive) > 1:
            away = self.alive[number % len(self.alive)].name
            self.membership.publish("", {r.name: r.name for r in self.alive if r.name != away})

    def _publish(self) -> None:
        self.membership.publish("", {replica.name: replica.name for replica in self.alive})

    def ask(self, prompt: list[int], num_choices: int, max_tokens: int) -> None:
        number = len(self.generations)
        generation = Generation(
            f"g{number}",
            [Prompt(prompt)],
            [ChoiceParams(max_tokens=max_tokens, seed=number, choice_index=i) for i in range(num_choices)],
            TextParams(),
            self.table,
            self.ingresses[number % 2],
            4096,
            self.loop.time(),
        )
        self.generations.append(generation)
        self.clients.append(asyncio.create_task(self._read(generation)))

    async def _read(self, generation: Generation) -> None:
        try:
            await generation.start()
            while not generation.is_finished:
                await generation.next()
        finally:
            generation.close()

    def leave(self, number: int) -> None:
        if number < len(self.clients) and not self.clients[number].done():
            self.left.add(number)
            self.clients[number].cancel()

    def step(self, number: int) -> None:
        alive = self.alive
        alive[number % len(alive)].step()
        self.loop.now_s += STEP_S / len(alive)

    async def settle(self, num_turns: int = 60) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Step until all clients that stay have their answers."""
        self._publish()
        for number in range(6000):
            if all(client.done() for client in self.clients):
                break
            self.step(number)
            await self.settle(10)
        await self.settle()
        results = await asyncio.gather(*self.clients, return_exceptions=True)
        for number, result in enumerate(results):
            assert number in self.left or result is None, f"request {number} ended with {result!r}"

    def check_answers(self) -> None:
        for number, generation in enumerate(self.generations):
            for choice in generation.choices:
                journal = choice.journal
                if number in self.left:
                    continue
                request = EngineRequest(journal.request_id, journal.prompt.token_ids, journal.params)
                expected, _ = generate(request, CONFIG, VOCAB_SIZE)
                assert journal.output_token_ids == expected, "a token is lost or said twice"
                assert journal.engine_id in self.replicas[journal.replica_id].finished or any(
                    placement.lost for placement in journal.placements
                ), "it was answered by a replica that did not have it"

    def check_places(self) -> None:
        """At rest a request is at one living replica or, if it is over or waits for one, at none."""
        for number, generation in enumerate(self.generations):
            for choice in generation.choices:
                name = choice.journal.request_id
                places = [
                    replica.name
                    for replica in self.alive
                    for request_id in replica.ids
                    if request_id.split("/", 1)[1].split(".")[0] == name
                ]
                is_over = self.clients[number].done() or choice.finish_reason
                assert len(places) <= (0 if is_over else 1), f"{name} is at {places}"

    async def stop(self) -> None:
        for ingress in self.ingresses:
            assert ingress.num_placed == 0, "a request is left behind"
            assert ingress.moves.num_under_way == 0, "a move is left behind"
            for view in ingress.open_views:
                view.check()
                assert view.num_booked == 0, "a booking is left behind"
            await ingress.stop()
        for replica in self.alive:
            assert not replica.ids, "a request is left at a replica"


async def play(world: World, actions: list[tuple[str, int, int]]) -> None:
    await world.start()
    for action, number, pause in actions:
        match action:
            case "ask":
                world.ask([number % 5] * (1 + number % 13), 1 + number % 3, 1 + number % 6)
            case "step":
                world.step(number)
            case "kill":
                world.kill(number)
            case "cut":
                world.cut(number)
            case "join":
                world.join()
            case "take away":
                world.take_away(number)
            case "leave":
                world.leave(number)
            case "rest":
                await world.settle()
                world.check_places()
        await world.settle(pause)
    await world.finish()
    world.check_answers()
    world.check_places()
    num_moved = sum(
        count
        for ingress in world.ingresses
        for (_, outcome), count in ingress.moves.counts.items()
        if outcome == "moved"
    )
    for ingress in world.ingresses:
        for reason, outcome in ingress.moves.counts:
            event(f"{reason}: {outcome}")
    event(f"moves: {min(num_moved, 5)}")
    await world.stop()


def run(coroutine: Callable[[SteppedLoop], Awaitable[None]]) -> None:
    loop = SteppedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(coroutine(loop))  # type: ignore[arg-type]


few = st.integers(0, 40)
actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "step", "step", "step", "kill", "cut", "join", "take away", "leave", "rest"]
        ),
        few,
        st.integers(0, 12),
    ),
    min_size=10,
    max_size=60,
)


@pytest.fixture(scope="module")
def table(byte_vocabulary) -> Any:
    return Tokenizer(byte_vocabulary).table


def check_anyhow(table: Any, actions: list[tuple[str, int, int]]) -> None:
    async def main(loop: SteppedLoop) -> None:
        await play(World(loop, table), actions)

    run(main)


@given(actions=actions)
@settings(max_examples=40, deadline=None)
def test_each_request_is_answered_once_by_a_replica_that_had_it(table, actions) -> None:
    check_anyhow(table, actions)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(actions=actions)
@settings(max_examples=1000, deadline=None)
def test_on_1000_days_each_request_is_answered_once(table, actions) -> None:
    check_anyhow(table, actions)
