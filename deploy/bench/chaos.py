"""Faults while streams run: which streams end as they would have, and how long they stood still.

Each round: streams run unbroken, and are the measure; the same streams run again, and once all of them have some
text, one process that is at work for them is killed or stopped. A stream is *intact* if it ended with the
text of its unbroken run. The cluster is a child of the benchmark, found from outside as an operator would.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from deploy.bench.report import percentile
from deploy.served_cluster import ServedCluster
from workers.engine.errors import ShoalError

WARM_CHUNKS = 8
"""Chunks that each stream has had when the fault strikes."""
RECOVERY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of process, and the signal it gets."""

    name: str
    word: str
    """In the command line or title of the process."""
    number: signal.Signals
    spares_streams: bool = True
    """False: the streams that pass through the process end with it, and only they."""


FAULTS = (
    Fault("kill-rank", "RankActor", signal.SIGKILL),
    Fault("kill-brain", "workers.brain", signal.SIGKILL),
    Fault("kill-replica", "ServeReplica:model", signal.SIGKILL),
    Fault("stop-rank", "RankActor", signal.SIGSTOP),
    Fault("stop-brain", "workers.brain", signal.SIGSTOP),
    Fault("kill-ingress", "ServeReplica:shoal-ingress", signal.SIGKILL, spares_streams=False),
)


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The load of each round."""

    num_streams: int
    output_len: int
    temperature: float
    """Of every second stream; the others are greedy."""


@dataclass(slots=True)
class StreamRecord:
    """What one stream brought."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    is_done: bool = False

    @property
    def longest_gap_s(self) -> float:
        """Between two chunks."""
        times = self.arrivals_s
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """One round; seconds."""

    fault: str
    num_streams: int
    num_ended: int
    """Came to their proper end."""
    num_intact: int
    """Of those, with the text of the unbroken run."""
    num_greedy_intact: int
    num_greedy: int
    gap_p50_s: float
    """The longest gap of each stream: half stood still for no longer than this."""
    gap_max_s: float
    gap_max_unbroken_s: float
    replica_back_s: float
    """From the fault until as many replicas as before take requests."""


async def run_round(cluster: ServedCluster, fault: Fault, plan: ChaosPlan) -> ChaosResult:
    """Run one round on a cluster that is whole, and wait until it is whole again.

    Raises:
        ShoalError: an unbroken stream failed, no process was at work, or the cluster did not recover.
    """
    async with httpx.AsyncClient(timeout=300.0, limits=httpx.Limits(max_connections=None)) as client:
        num_replicas = await _num_open(client, cluster)
        unbroken = await _run_all(client, cluster, plan, on_warm=None)
        if not all(one.is_done for one in unbroken):
            raise ShoalError(f"{fault.name}: streams failed before anything was broken")
        recovery = _Recovery(client, cluster, fault, num_replicas)
        broken = await _run_all(client, cluster, plan, recovery.strike)
        back_s = await recovery.wait(timeout_s=RECOVERY_TIMEOUT_S)
    gaps = [one.longest_gap_s for one in broken]
    intact = [a.is_done and a.text == b.text for a, b in zip(broken, unbroken, strict=True)]
    return ChaosResult(
        fault=fault.name,
        num_streams=len(broken),
        num_ended=sum(one.is_done for one in broken),
        num_intact=sum(intact),
        num_greedy_intact=sum(intact[::2]),
        num_greedy=len(intact[::2]),
        gap_p50_s=round(percentile(gaps, 0.5), 3),
        gap_max_s=round(max(gaps), 3),
        gap_max_unbroken_s=round(max(one.longest_gap_s for one in unbroken), 3),
        replica_back_s=round(back_s, 1),
    )


async def _run_all(
    client: httpx.AsyncClient,
    cluster: ServedCluster,
    plan: ChaosPlan,
    on_warm: Callable[[], Awaitable[None]] | None,
) -> list[StreamRecord]:
    """All streams of the plan; ``on_warm`` is awaited once each has had some text."""
    records = [StreamRecord() for _ in range(plan.num_streams)]
    warm = asyncio.Event()

    def on_chunk() -> None:
        if all(len(one.arrivals_s) >= WARM_CHUNKS for one in records):
            warm.set()

    streams = [
        asyncio.create_task(_run_stream(client, cluster, _body(cluster, plan, number), record, on_chunk))
        for number, record in enumerate(records)
    ]
    if on_warm is not None:
        await asyncio.wait_for(warm.wait(), 120.0)
        await on_warm()
    await asyncio.gather(*streams)
    return records


def _body(cluster: ServedCluster, plan: ChaosPlan, number: int) -> dict[str, Any]:
    return {
        "model": cluster.model,
        "prompt": f"Story number {number}. Once upon a time there was a",
        "max_tokens": plan.output_len,
        "temperature": plan.temperature if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }


async def _run_stream(
    client: httpx.AsyncClient,
    cluster: ServedCluster,
    body: dict[str, Any],
    record: StreamRecord,
    on_chunk: Callable[[], None],
) -> None:
    try:
        async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    record.is_done = answer.status_code == 200
                elif line.startswith("data: {"):
                    choices = orjson.loads(line[len("data: ") :]).get("choices") or []
                    record.text += "".join(choice["text"] for choice in choices)
                    record.arrivals_s.append(time.monotonic())
                    on_chunk()
    except httpx.HTTPError:
        return  # it has not ended properly, which is what is counted


async def _num_open(client: httpx.AsyncClient, cluster: ServedCluster) -> int:
    """Replicas that take requests, as the ingress that answers sees it; 0 if none answers."""
    try:
        answer = await client.get(f"{cluster.url}/health", timeout=5.0)
        return sum(int(model["num_open_replicas"]) for model in answer.json()["models"].values())
    except (httpx.HTTPError, ValueError):
        return 0


class _Recovery:
    """Strikes, and watches how long replicas are missing."""

    def __init__(
        self, client: httpx.AsyncClient, cluster: ServedCluster, fault: Fault, num_replicas: int
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._fault = fault
        self._num_replicas = num_replicas
        self._struck_s = 0.0
        self._missing: asyncio.Task[None] | None = None

    async def strike(self) -> None:
        """Send the signal to a process at work."""
        process = await asyncio.to_thread(self._cluster.busiest, self._fault.word)
        process.send_signal(self._fault.number)
        self._struck_s = time.monotonic()
        self._missing = asyncio.create_task(self._until(lambda count: count < self._num_replicas))

    async def wait(self, timeout_s: float) -> float:
        """Seconds from the strike until all replicas are there again; 0 if none was ever missing.

        Call it once the streams have ended: a replica that worked for one of them has been missed by then.
        """
        assert self._missing is not None, "nothing has been struck"
        was_missing = self._missing.done()
        self._missing.cancel()
        if not was_missing:
            return 0.0
        try:
            await asyncio.wait_for(self._until(lambda count: count >= self._num_replicas), timeout_s)
        except TimeoutError:
            raise ShoalError(
                f"{self._fault.name}: fewer than {self._num_replicas} replicas {timeout_s:g} s after the streams"
            ) from None
        return time.monotonic() - self._struck_s

    async def _until(self, is_so: Callable[[int], bool]) -> None:
        while not is_so(await _num_open(self._client, self._cluster)):  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.1)
