"""A step in load on a live cluster: how soon replicas come, and go again, and whether a stream is cut.

Requests arrive at one rate, at another from ``step_s`` on, and at the first again from ``back_s`` on: an open loop,
since a closed one would ask for less where it is answered late. Where the first rate is zero, all replicas may go, and
one request at the end wakes the model.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from deploy.bench.http_load import LoadPlan, StreamTimes, run_request
from deploy.served_cluster import ServedCluster

SAMPLE_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rates in requests a second, times in seconds from the beginning."""

    low_per_s: float
    high_per_s: float
    step_s: float
    back_s: float
    end_s: float

    def rate_at(self, time_s: float) -> float:
        """How many requests a second arrive then."""
        return self.high_per_s if self.step_s <= time_s < self.back_s else self.low_per_s

    def arrivals(self) -> Iterator[float]:
        """When requests arrive."""
        now_s = 0.0 if self.low_per_s else self.step_s
        while (rate := self.rate_at(now_s)) and (now_s := now_s + 1 / rate) < self.end_s:
            yield now_s


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was seen; each point is (seconds, value)."""

    num_requests: int
    num_failed: int
    first_up_s: float | None
    """From the step until another replica took requests; None: none came."""
    most_up_s: float | None
    """From the step until there were as many as there were ever."""
    first_down_s: float | None
    """From the step back until there was one fewer."""
    none_s: float | None
    """From the step back until there was none; None: there always was."""
    woken_s: float | None
    """From the request that woke the model until its first token; None: none had to."""
    replicas: list[tuple[float, float]]
    requests: list[tuple[float, float]]
    """Under way."""


async def run_step(cluster: ServedCluster, request: LoadPlan, plan: StepPlan) -> StepResult:
    """Send the plan's arrivals to ``cluster``, each as ``request`` says, and watch its replicas."""
    started_s = time.monotonic()
    replicas: list[tuple[float, float]] = []
    requests: list[tuple[float, float]] = []
    watching = asyncio.create_task(_watch(cluster, started_s, replicas, requests))
    asked: list[asyncio.Task[StreamTimes]] = []
    rng = random.Random(1)
    for at_s in plan.arrivals():
        await asyncio.sleep(started_s + at_s - time.monotonic())
        asked.append(asyncio.create_task(run_request(request, rng)))
    await asyncio.gather(*asked, return_exceptions=True)
    woken_s: float | None = None
    if not plan.low_per_s:
        await _until_none(replicas, started_s + plan.end_s)
        asked.append(asyncio.create_task(run_request(request, rng)))
        woken = await asked[-1]
        woken_s = round(woken.arrivals_s[0] - woken.sent_s, 1) if woken.arrivals_s else None
    done = await asyncio.gather(*asked, return_exceptions=True)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    before = max((count for at_s, count in replicas if at_s < plan.step_s), default=0.0)
    most = max(count for _, count in replicas)
    after = [(at_s - plan.step_s, count) for at_s, count in replicas if at_s >= plan.step_s]
    falls = (
        later_s - plan.back_s
        for (_, count), (later_s, fewer) in itertools.pairwise(replicas)
        if later_s > plan.back_s and fewer < count
    )
    return StepResult(
        num_requests=len(done),
        num_failed=sum(isinstance(one, BaseException) or not one.is_done for one in done),
        first_up_s=next((round(at_s, 1) for at_s, count in after if count > before), None),
        most_up_s=next((round(at_s, 1) for at_s, count in after if count == most > before), None),
        first_down_s=next((round(fall_s, 1) for fall_s in falls), None),
        none_s=next(
            (round(at_s - plan.back_s, 1) for at_s, count in replicas if at_s > plan.back_s and not count),
            None,
        ),
        woken_s=woken_s,
        replicas=replicas,
        requests=requests,
    )


async def _until_none(replicas: list[tuple[float, float]], deadline_s: float) -> None:
    """Return once the last sample says that there is no replica, or at the deadline."""
    while time.monotonic() < deadline_s:
        if replicas and not replicas[-1][1]:
            return
        await asyncio.sleep(SAMPLE_PERIOD_S)


async def _watch(
    cluster: ServedCluster,
    started_s: float,
    replicas: list[tuple[float, float]],
    requests: list[tuple[float, float]],
) -> None:
    async with httpx.AsyncClient(timeout=30.0) as client:
        while True:
            models = (await client.get(f"{cluster.url}/health")).json()["models"].values()
            at_s = round(time.monotonic() - started_s, 2)
            replicas.append((at_s, float(sum(one["num_open_replicas"] for one in models))))
            requests.append((at_s, float(sum(one["num_requests"] for one in models))))
            await asyncio.sleep(SAMPLE_PERIOD_S)
