"""The ranks of one replica: Ray actors in the bundles of the replica's own placement group."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.rank_actor import RankActor
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.model.rank_config import BlockCounts, RankConfig

logger = logging.getLogger(__name__)


class RankGroup:
    """Starts the ranks, watches them, and can end them at once.

    ``lost`` is set, with a reason, as soon as any rank has ended.
    """

    def __init__(self, config: RankConfig, num_ranks: int, uses_gpu: bool) -> None:
        """Create one actor a bundle; returns before they run.

        Args:
            config: of every rank; ``tp_rank`` is filled in here.
        """
        group = ray.util.get_current_placement_group()
        self._actors = []
        for rank in range(num_ranks):
            actor: Any = RankActor  # the decorator hides what it adds
            options: dict[str, object] = {"num_cpus": 1, "num_gpus": 1 if uses_gpu else 0}
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                )
            self._actors.append(
                actor.options(**options).remote(replace(config, tp_rank=rank, tp_size=num_ranks))
            )
        self._pids: list[int] = []
        self._watch: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def load(self, host: str) -> BlockCounts:
        """Let the ranks meet and load their weights.

        Returns:
            KV blocks that fit every rank.
        """
        self._pids = list(await asyncio.gather(*(actor.pid.remote() for actor in self._actors)))
        rendezvous = await self._actors[0].rendezvous_address.remote(host) if len(self._actors) > 1 else None
        counts = await asyncio.gather(*(actor.load.remote(rendezvous) for actor in self._actors))
        return BlockCounts.least(counts)

    async def allocate(self, engine_config: EngineConfig) -> CostModel:
        """Take the KV pool on every rank, warm up, and time some steps.

        Returns:
            What steps cost on rank 0, which waits for the others.
        """
        costs = await asyncio.gather(*(actor.allocate.remote(engine_config) for actor in self._actors))
        return costs[0]

    def serve_steps(self, endpoint: str) -> None:
        """Let the ranks connect to the step channel and watch for the first that ends."""
        calls = [actor.serve_steps.remote(endpoint) for actor in self._actors]
        self._watch = asyncio.create_task(self._wait_for_end(calls))

    async def _wait_for_end(self, calls: list[ray.ObjectRef[None]]) -> None:
        futures = {asyncio.ensure_future(_as_coroutine(call)): rank for rank, call in enumerate(calls)}
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        first = next(iter(done))
        error = first.exception()
        reason = f"{type(error).__name__}: {error}".splitlines()[0] if error else "its step channel closed"
        if not self.lost.done():
            self.lost.set_result(f"rank {futures[first]} has ended ({reason})")

    def kill(self) -> None:
        """End all ranks now. A stopped process only hears SIGKILL, which Ray takes 5 s to send."""
        for pid in self._pids:
            _kill_process(pid)
        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception as error:  # noqa: BLE001 - Ray itself may be gone; the others must still be ended
                logger.debug("a rank could not be killed through Ray: %s", error)


async def _as_coroutine(call: ray.ObjectRef[None]) -> None:
    await call


def _kill_process(pid: int) -> None:
    """SIGKILL a process of this host; of no effect if it has ended, or runs on another host."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def host_address(host: str) -> str:
    """The address by which other nodes reach a socket bound to ``host``."""
    if host not in ("0.0.0.0", "::"):
        return host
    address = ray.util.get_node_ip_address()
    return address if address else socket.gethostbyname(socket.gethostname())
