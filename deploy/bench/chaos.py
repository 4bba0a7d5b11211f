"""Faults while streams run: which streams end as they would have, and how long they stood still.

Each round: streams run unbroken, and are the measure; the same streams run again, and once all of them have some
text, a fault strikes (``deploy.bench.faults``). Streams that end before it has been done and its replica missed begin
again, so that all of it falls into streams. One is *intact* if it ended with the text of its unbroken run.
The cluster is a child of the benchmark, found from outside as an operator would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import httpx

from deploy.bench.faults import C, Fault, SeenCluster
from deploy.bench.report import percentile
from deploy.bench.streams import StreamPlan, StreamRecord, run_streams, run_streams_beside
from workers.engine.errors import ShoalError

RECOVERY_TIMEOUT_S = 120.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """One round; seconds."""

    fault: str
    num_streams: int
    """That ran, those counted that ran again."""
    num_under_way: int
    """Of those, the ones that had not ended when it had been done."""
    num_ended: int
    """Came to their proper end."""
    num_intact: int
    """Of those, with the text of the unbroken run."""
    num_greedy_intact: int
    num_greedy: int
    num_moved: int
    """Went on at another replica."""
    detection_s: float | None
    """From the fault until an ingress counted a replica less; None: none was missed while streams ran."""
    gap_p50_s: float
    """Of the longest gap of each stream in all of its runs: half stood still for no longer than this."""
    gap_p99_s: float
    gap_p99_unbroken_s: float
    replica_back_s: float | None
    """From the fault until as many replicas as before take requests; None: none was missed, or not by itself."""


async def run_round(cluster: C, fault: Fault[C], plan: StreamPlan) -> ChaosResult:
    """Run one round on a cluster that is whole, and wait until it is whole again.

    Raises:
        ShoalError: an unbroken stream failed, no process was at work, or the cluster did not recover.
    """
    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None)) as client:
        num_whole = await _num_open(client, cluster)
        await asyncio.to_thread(fault.prepare, cluster)
        unbroken = await run_streams(client, cluster.url, cluster.model, plan)
        if not all(one.is_done for one in unbroken):
            raise ShoalError(f"{fault.name}: streams failed before anything was broken")
        watch = _Watch(client, cluster, fault)
        broken = await run_streams_beside(client, cluster.url, cluster.model, plan, watch.strike)
        await watch.stop()
        await asyncio.to_thread(fault.restore, cluster)
        back_s = await watch.wait_until_whole(num_whole, RECOVERY_TIMEOUT_S)
    runs = [one for own in broken for one in own]
    intact = [
        [one.is_done and one.text == whole.text for one in own]
        for own, whole in zip(broken, unbroken, strict=True)
    ]
    greedy = [one for own in intact[::2] for one in own]
    gaps = [max(one.longest_gap_s for one in own) for own in broken]
    detection_s = watch.detection_s if fault.loses_replica else None
    return ChaosResult(
        fault=fault.name,
        num_streams=len(runs),
        num_under_way=watch.num_under_way,
        num_ended=sum(one.is_done for one in runs),
        num_intact=sum(map(sum, intact)),
        num_greedy_intact=sum(greedy),
        num_greedy=len(greedy),
        num_moved=sum(one.num_moves > 0 for one in runs),
        detection_s=detection_s,
        gap_p50_s=round(percentile(gaps, 0.5), 3),
        gap_p99_s=round(percentile(gaps, 0.99), 3),
        gap_p99_unbroken_s=round(percentile([one.longest_gap_s for one in unbroken], 0.99), 3),
        replica_back_s=round(back_s, 1) if fault.heals and detection_s is not None else None,
    )


async def _num_open(client: httpx.AsyncClient, cluster: SeenCluster) -> int:
    """Replicas that take requests, as the ingress that answers sees it; 0 if none answers."""
    try:
        answer = await client.get(f"{cluster.url}/health", timeout=5.0)
        return sum(int(model["num_open_replicas"]) for model in answer.json()["models"].values())
    except (httpx.HTTPError, ValueError):
        return 0


class _Watch(Generic[C]):
    """Strikes, and watches what the ingresses see of it."""

    def __init__(self, client: httpx.AsyncClient, cluster: C, fault: Fault[C]) -> None:
        self._client = client
        self._cluster = cluster
        self._fault = fault
        self._struck_s = 0.0
        self._seen_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_under_way = 0

    @property
    def detection_s(self) -> float | None:
        """From the strike until an ingress counted a replica less; None: none did."""
        return None if self._seen_s is None else round(max(0.0, self._seen_s - self._struck_s), 2)

    async def strike(self, runs: list[list[StreamRecord]]) -> None:
        """Let the fault strike while streams run, and return when it has been done and what it takes is missed."""
        num_open = await _num_open(self._client, self._cluster)
        self._task = asyncio.create_task(self._note_a_missing_replica(num_open))
        self._struck_s = await asyncio.to_thread(self._fault.strike, self._cluster)
        self.num_under_way = sum(not one.has_ended for own in runs for one in own)
        if self._fault.loses_replica:
            await asyncio.wait([self._task], timeout=RECOVERY_TIMEOUT_S)

    async def stop(self) -> None:
        """Look no more for a missing replica."""
        assert self._task is not None, "nothing has been struck"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_until_whole(self, num_replicas: int, timeout_s: float) -> float:
        """Return how many seconds after the strike so many replicas take requests.

        Raises:
            ShoalError: not within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda count: count == num_replicas)
        except TimeoutError:
            raise ShoalError(
                f"{self._fault.name}: not {num_replicas} replicas {timeout_s:g} s after the streams"
            ) from None
        return time.monotonic() - self._struck_s

    async def _note_a_missing_replica(self, num_open: int) -> None:
        await self._until(lambda count: count < num_open)
        self._seen_s = time.monotonic()

    async def _until(self, is_so: Callable[[int], bool]) -> None:
        while not is_so(await _num_open(self._client, self._cluster)):  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(_POLL_S)
