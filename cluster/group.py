"""The ranks of one replica: Ray actors in the bundles of the replica's own placement group."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actor_process import ActorProcess, find_process
from cluster.config import ReplicaConfig
from cluster.node_watch import FarProcesses, NodeWatch, kill_process
from cluster.rank_actor import RankActor, RankPlace
from cluster.signs import PATIENCE, wait_for_silence
from workers.channel.link import new_remote_endpoint
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest, RankLost
from workers.model.rank_config import BlockCounts, RankConfig
from workers.model.rendezvous import forget_rendezvous
from workers.process_state import ProcessState, process_state

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")

_BLAME_S = 0.3
"""After an error, for what may be its cause to be seen: that another rank has ended."""


class RankGroup:
    """Starts the ranks, watches them, and can end them at once.

    ``lost`` is set, with a reason, as soon as any rank has ended or does not answer.
    """

    def __init__(self, config: RankConfig, replica: ReplicaConfig) -> None:
        """Create one actor a bundle; returns before they run.

        Args:
            config: of every rank; ``tp_rank`` is filled in here.
            replica: how many ranks, on which kind of device, and what they load.
        """
        self._node_id = ray.get_runtime_context().get_node_id()
        self._placement = ray.util.get_current_placement_group()
        self._config = config
        self._replica = replica
        self._host = replica.host
        self._silence_s = replica.rank_timeout_s
        self._actors: dict[int, Any] = {}
        """By rank, in order."""
        for rank in range(replica.tensor_parallel_size):
            self._make(rank)
        self._places: list[RankPlace] = []
        self._processes: dict[int, ActorProcess] = {}
        """By rank, as far as they are known: sooner than a rank can tell its place."""
        self._rendezvous: str | None = None
        self._far: dict[str, FarProcesses] = {}
        """Ranks of other nodes by node."""
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def load(self) -> BlockCounts:
        """Let the ranks meet and load their weights.

        Returns:
            KV blocks that fit every rank.

        Raises:
            InvalidRequest: they run on several nodes, but may speak on loopback only.
            RankLost: one has ended or is stopped; all were ended.
        """
        # One that loads may answer nobody for minutes; that it is stopped or has ended can be seen all the same.
        self._watch = asyncio.create_task(self._wait_for_silence([_no_question] * len(self._actors)))
        self._places = await self._answers(*(self._place_of(rank) for rank in self._actors))
        logger.info("ranks run at %s", self._places)
        check_reach(self._places, self._host)
        self._far = self._watch_other_nodes()
        self._tasks += [asyncio.create_task(far.look()) for far in self._far.values()]
        if len(self._actors) > 1:
            address = self._places[0].node_address if self._spans_nodes else None
            (self._rendezvous,) = await self._answers(self._actors[0].rendezvous_address.remote(address))
        return BlockCounts.least(
            await self._answers(*(actor.load.remote(self._rendezvous) for actor in self._actors.values()))
        )

    async def allocate(self, engine_config: EngineConfig) -> CostModel:
        """Take the KV pool on every rank, warm up, and time some steps.

        Returns:
            What steps cost on rank 0, which waits for the others.

        Raises:
            RankLost: one has ended or is stopped; all were ended.
        """
        costs = await self._answers(
            *(actor.allocate.remote(engine_config) for actor in self._actors.values())
        )
        return costs[0]

    def step_endpoint(self) -> str | None:
        """Where the brain, on this node, must listen for its ranks; None: any endpoint of this machine will do."""
        return new_remote_endpoint(host_address(self._host)) if self._spans_nodes else None

    def serve_steps(self, endpoint: str) -> None:
        """Let the ranks connect to the step channel and watch for the first that ends or falls silent."""
        calls = [actor.serve_steps.remote(endpoint) for actor in self._actors.values()]
        if self._watch is not None:
            self._watch.cancel()
        asks = [lambda actor=actor: _wait(actor.is_there.remote()) for actor in self._actors.values()]
        self._watch = asyncio.create_task(self._wait_for_silence(asks))
        self._tasks.append(asyncio.create_task(self._wait_for_end(calls)))

    @property
    def _spans_nodes(self) -> bool:
        return len({place.node_id for place in self._places}) > 1

    async def _wait_for_end(self, calls: list[ray.ObjectRef[None]]) -> None:
        futures = {asyncio.ensure_future(_wait(call)): rank for rank, call in enumerate(calls)}
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        first = next(iter(done))
        rank, error = futures[first], first.exception()
        self._lose(f"rank {rank} of {len(futures)} has ended ({_reason(error)})")

    async def _answers(self, *calls: Awaitable[Answer]) -> list[Answer]:
        """What ranks answer, however long that takes; on any error, and as soon as one is lost, all are ended."""
        try:
            return await gather_unless_lost(calls, self.lost)
        except BaseException:
            await self.kill_far()
            self.kill()  # the others wait for the one that has failed
            raise

    async def _wait_for_silence(self, asks: Sequence[Callable[[], Awaitable[object]]]) -> None:
        looks = [lambda rank=rank: self._state_of(rank) for rank in self._actors]
        rank, reason = await wait_for_silence(asks, looks, self._silence_s)
        self._lose(f"rank {rank} {reason}")

    def _make(self, rank: int) -> Any:
        actor: Any = RankActor  # the decorator hides what it adds
        replica = self._replica
        options: dict[str, object] = {"num_cpus": 1, "num_gpus": 1 if replica.device == "cuda" else 0}
        config = replace(self._config, tp_rank=rank, tp_size=replica.tensor_parallel_size)
        self._actors[rank] = actor.options(**options, **self._in_bundle(rank)).remote(
            config,
            replica.model,
            replica.source,
            ActorProcess(self._node_id, os.getpid()),
            replica.rank_timeout_s,
        )
        return self._actors[rank]

    async def _place_of(self, rank: int) -> RankPlace:
        """Where a rank runs, as it says itself; its process is known before."""
        patience_s = PATIENCE * self._silence_s
        self._processes[rank] = await find_process(self._actors[rank], lambda: self._make(rank), patience_s)
        place: RankPlace = await self._actors[rank].place.remote()
        return place

    def _state_of(self, rank: int) -> ProcessState:
        process = self._processes.get(rank)
        if process is None:
            return ProcessState.UNKNOWN
        if process.node_id == self._node_id:
            return process_state(process.pid)
        far = self._far.get(process.node_id)
        return ProcessState.UNKNOWN if far is None else far.state_of(process.pid)

    def _watch_other_nodes(self) -> dict[str, FarProcesses]:
        """Start a watch on each other node where ranks are; returns before they run."""
        by_node: dict[str, list[int]] = {}
        for rank, place in enumerate(self._places):
            if place.node_id != self._node_id:
                by_node.setdefault(place.node_id, []).append(rank)
        found = {}
        for node, ranks in by_node.items():
            watch: Any = NodeWatch  # the decorator hides what it adds
            actor = watch.options(**self._in_bundle(ranks[0])).remote()
            found[node] = FarProcesses(
                [self._places[rank].pid for rank in ranks],
                _call(actor.states),
                _call(actor.kill),
            )
        return found

    def _in_bundle(self, rank: int) -> dict[str, object]:
        """Options of an actor beside a rank."""
        if self._placement is None:
            return {}
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=rank
            )
        }

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def kill_far(self) -> None:
        """End the ranks of other nodes, a stopped one too, for which Ray takes its time."""
        await asyncio.gather(*(far.kill() for far in self._far.values()))

    def kill(self) -> None:
        """End all ranks now. A stopped process only hears SIGKILL, which Ray takes 5 s to send.

        Ranks of this host are ended without Ray, whose calls take their time; it will see that they have ended.
        """
        local = {rank for rank, process in self._processes.items() if process.node_id == self._node_id}
        for rank in local:
            kill_process(self._processes[rank].pid)
        for rank, actor in self._actors.items():
            if rank in local:
                continue
            try:
                ray.kill(actor)
            except Exception as error:  # noqa: BLE001 - Ray itself may be gone; the others must still be ended
                logger.debug("a rank could not be killed through Ray: %s", error)
        forget_rendezvous(self._rendezvous)


async def gather_unless_lost(calls: Sequence[Awaitable[Answer]], lost: asyncio.Future[str]) -> list[Answer]:
    """What ranks answer while they start, however long that takes.

    Raises:
        RankLost: ``lost`` has told of one; an error of another that came just before is taken for its consequence.
    """
    answers = asyncio.gather(*(_wait(call) for call in calls))
    either: list[asyncio.Future[Any]] = [answers, lost]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answers.done() and answers.exception() is not None:
            await asyncio.wait([lost], timeout=_BLAME_S)
        if lost.done():
            raise RankLost(f"{lost.result()}, before the model was loaded")
        return await answers
    finally:
        answers.cancel()
        # Or asyncio tells that nobody has looked at its end.
        await asyncio.gather(answers, return_exceptions=True)


def check_reach(places: list[RankPlace], host: str) -> None:
    """See that ranks of several hosts may speak to each other.

    Raises:
        InvalidRequest: ``host`` is loopback, and they run on several hosts.
    """
    addresses = sorted({place.node_address for place in places})
    if len(addresses) > 1 and _is_loopback(host):
        raise InvalidRequest(
            f"--host is {host}, and the ranks of a replica run on {len(addresses)} hosts ({', '.join(addresses)}): "
            "give an address that they reach, or 0.0.0.0",
            "host",
        )


def _call(method: Any) -> Callable[[Sequence[int]], Awaitable[Any]]:
    """An actor's method as one to be awaited."""
    return lambda pids: _wait(method.remote(pids))


async def _no_question() -> None:
    """Asked of a rank that has no time to answer."""


async def _wait(call: Awaitable[Answer]) -> Answer:
    return await call


def _reason(error: BaseException | None) -> str:
    """Why a rank's serving ended, in words of ours where Ray would explain how it found out."""
    if error is None:
        return "its step channel closed"
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process is gone: killed, crashed, or out of memory"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def host_address(host: str) -> str:
    """The address by which other nodes reach a socket bound to ``host``."""
    if host not in ("0.0.0.0", "::"):
        return host
    address = ray.util.get_node_ip_address()
    return address if address else socket.gethostbyname(socket.gethostname())


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("localhost", "::1")
