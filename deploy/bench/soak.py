"""A steady load for minutes: nothing fails, and no process grows.

Each stream sends one request after the other until the time is over; in the middle the cluster may be changed under
them. Meanwhile every process of the cluster is looked
at from outside: resident memory, open files, threads, and the ingress's asyncio tasks by its metrics. A leak shows as a
slope that goes on after the first minutes' warming up, so the slope is that of the second half.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from deploy.bench.http_load import LoadPlan, StreamTimes, run_request
from deploy.bench.report import percentile

SAMPLE_PERIOD_S = 5.0
SETTLE_S = 30.0
"""For what is cancelled and closed at the end to be taken back everywhere."""
_KINDS = {
    "ingress": "ServeReplica:shoal-ingress",
    "replica": "ServeReplica:model",
    "brain": "workers.brain",
    "rank": "RankActor",
    "haproxy": "haproxy",
}
_GAUGES = ("shoal_requests_in_flight", "shoal_router_requests_at_replicas", "shoal_replica_running_requests")
"""Zero when nothing is asked."""
_TASKS = "shoal_ingress_tasks"
_BLOCKS, _HOST_BLOCKS = "shoal_replica_blocks", "shoal_replica_host_blocks"
_COPIED_OUT = "shoal_replica_blocks_swapped_out"
BLOCK_SIZE = 16
"""The default of ``shoal serve``."""


class SoakedCluster(Protocol):
    """A cluster as it is seen from outside."""

    @property
    def url(self) -> str:
        """The endpoint."""

    def processes(self, word: str) -> list[psutil.Process]:
        """Its processes with ``word`` in their command line or title."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The processes of one kind at one moment, summed."""

    at_s: float
    rss_mib: float
    num_files: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """What became of one kind of process over the second half of the load, and when it had ended."""

    rss_first_mib: float
    rss_last_mib: float
    rss_by_minute_mib: list[float]
    """At the end of each minute."""
    rss_mib_per_min: float
    """Least squares over the second half."""
    rss_error_mib_per_min: float
    """Its standard error, by how far samples lie from the line."""
    files_middle: int
    files_last: int
    files_after: int
    threads_middle: int
    threads_last: int


@dataclass(frozen=True, slots=True)
class Pools:
    """Memory that ranks reserve at their start, and that only becomes resident where blocks are written."""

    num_blocks: int
    num_blocks_asked: int
    """By all requests together: none is left to be written once these are some more than there are."""
    num_host_blocks: int
    num_blocks_copied_out: int


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to the cluster in the middle; seconds from the beginning."""

    began_s: float
    ended_s: float
    num_under_way: int
    """Requests that ran for a part of that time."""


@dataclass(frozen=True, slots=True)
class SoakResult:
    """One soak."""

    num_streams: int
    duration_s: float
    num_requests: int
    num_failed: int
    num_chunks: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tasks_before: float
    tasks_middle: float
    tasks_last: float
    tasks_after: float
    gauges_after: dict[str, float]
    pools: Pools
    growth: dict[str, Growth]
    change: Change | None
    """None: nothing was changed."""


@dataclass(slots=True)
class _Watch:
    """Samples so far."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    tasks: list[float] = field(default_factory=list)


async def run_soak(
    cluster: SoakedCluster,
    plan: LoadPlan,
    duration_s: float,
    change: Callable[[], None] | None = None,
) -> SoakResult:
    """Load ``cluster`` with ``plan.num_streams`` streams for ``duration_s``, then see whether all is given back.

    Args:
        change: what to do to the cluster when half of the time is over; blocks until it is done.
    """
    metrics_url = f"{cluster.url}/metrics"
    before = await _gauges(metrics_url)
    watch = _Watch()
    started_s = time.perf_counter()
    watching = asyncio.create_task(_watch(cluster, metrics_url, watch, started_s))
    changing = asyncio.create_task(_do_in_the_middle(change, started_s + duration_s / 2))
    try:
        per_stream = await asyncio.gather(
            *(_stream(plan, number, started_s + duration_s) for number in range(plan.num_streams))
        )
        changed = await changing
    finally:
        changing.cancel()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    wall_s = time.perf_counter() - started_s
    after = await _settled(metrics_url, before[_TASKS])
    times = [one for stream in per_stream for one in stream]
    firsts = [one.arrivals_s[0] - one.sent_s for one in times if one.arrivals_s]
    last = {kind: _sample(cluster, kind, wall_s) for kind in watch.samples}
    return SoakResult(
        num_streams=plan.num_streams,
        duration_s=round(wall_s, 1),
        num_requests=len(times),
        num_failed=sum(not one.is_done for one in times),
        num_chunks=sum(len(one.arrivals_s) for one in times),
        ttft_p50_ms=round(1e3 * percentile(firsts, 0.5), 1) if firsts else 0.0,
        ttft_p99_ms=round(1e3 * percentile(firsts, 0.99), 1) if firsts else 0.0,
        tasks_before=before[_TASKS],
        tasks_middle=watch.tasks[len(watch.tasks) // 2],
        tasks_last=watch.tasks[-1],
        tasks_after=after[_TASKS],
        gauges_after={name: after[name] for name in _GAUGES},
        pools=Pools(
            num_blocks=int(after[_BLOCKS]),
            num_blocks_asked=int(sum(one.is_done for one in times) * _blocks_a_request(plan)),
            num_host_blocks=int(after[_HOST_BLOCKS]),
            num_blocks_copied_out=int(after[_COPIED_OUT]),
        ),
        growth={kind: _growth(found, last[kind]) for kind, found in watch.samples.items()},
        change=None if changed is None else _change(changed, times, started_s),
    )


def slope_per_min(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares slope of (seconds, value), a minute, and its standard error; 0 for too few points."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / max(1, count)
    mean_y = sum(y for _, y in points) / max(1, count)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return 60 * slope, 60 * math.sqrt(rest / max(1, count - 2) / spread)


def _blocks_a_request(plan: LoadPlan) -> float:
    """On average; the last token is never computed, so it needs no slot."""
    lengths = range(plan.input_len - plan.spread, plan.input_len + 1)
    return sum(-(-(one + plan.output_len - 1) // BLOCK_SIZE) for one in lengths) / len(lengths)


def _growth(samples: Sequence[Sample], after: Sample) -> Growth:
    half = samples[len(samples) // 2 :]
    slope, error = slope_per_min([(one.at_s, one.rss_mib) for one in half])
    return Growth(
        rss_first_mib=round(samples[0].rss_mib, 1),
        rss_last_mib=round(samples[-1].rss_mib, 1),
        rss_by_minute_mib=list({int(one.at_s // 60): round(one.rss_mib, 1) for one in samples}.values()),
        rss_mib_per_min=round(slope, 2),
        rss_error_mib_per_min=round(error, 2),
        files_middle=half[0].num_files,
        files_last=half[-1].num_files,
        files_after=after.num_files,
        threads_middle=half[0].num_threads,
        threads_last=half[-1].num_threads,
    )


async def _do_in_the_middle(change: Callable[[], None] | None, at_s: float) -> tuple[float, float] | None:
    """When it began and ended, on the clock of ``StreamTimes``."""
    if change is None:
        return None
    await asyncio.sleep(at_s - time.perf_counter())
    began_s = time.perf_counter()
    await asyncio.to_thread(change)
    return began_s, time.perf_counter()


def _change(changed: tuple[float, float], times: Sequence[StreamTimes], started_s: float) -> Change:
    began_s, ended_s = changed
    under_way = [
        one for one in times if one.sent_s < ended_s and (one.arrivals_s or [one.sent_s])[-1] > began_s
    ]
    return Change(round(began_s - started_s, 1), round(ended_s - started_s, 1), len(under_way))


async def _stream(plan: LoadPlan, number: int, until_s: float) -> list[StreamTimes]:
    rng = random.Random(number)
    done = []
    while time.perf_counter() < until_s:
        sent_s = time.perf_counter()
        try:
            done.append(await run_request(plan, rng))
        except OSError:  # refused or cut: a request that failed
            done.append(StreamTimes(sent_s))
    return done


async def _watch(cluster: SoakedCluster, metrics_url: str, watch: _Watch, started_s: float) -> None:
    while True:
        for kind in _KINDS:
            sample = await asyncio.to_thread(_sample, cluster, kind, time.perf_counter() - started_s)
            if sample.num_files:
                watch.samples.setdefault(kind, []).append(sample)
        watch.tasks.append((await _gauges(metrics_url))[_TASKS])
        await asyncio.sleep(SAMPLE_PERIOD_S)


def _sample(cluster: SoakedCluster, kind: str, at_s: float) -> Sample:
    rss, num_files, num_threads = 0, 0, 0
    for process in cluster.processes(_KINDS[kind]):
        try:
            rss += process.memory_info().rss
            num_files += process.num_fds()
            num_threads += process.num_threads()
        except psutil.Error:
            continue  # it has just ended
    return Sample(at_s, rss / (1 << 20), num_files, num_threads)


async def _settled(metrics_url: str, num_tasks: float) -> Mapping[str, float]:
    """The gauges once they are back where they were, or after ``SETTLE_S``."""
    deadline_s = time.perf_counter() + SETTLE_S
    while True:
        found = await _gauges(metrics_url)
        if (found[_TASKS] <= num_tasks and not any(found[name] for name in _GAUGES)) or (
            time.perf_counter() > deadline_s
        ):
            return found
        await asyncio.sleep(0.5)


async def _gauges(url: str) -> dict[str, float]:
    """Sums of the gauges that should be zero, the number of tasks, and counts of blocks."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        page = (await client.get(url)).raise_for_status().text
    found = dict.fromkeys((*_GAUGES, _TASKS, _BLOCKS, _HOST_BLOCKS, _COPIED_OUT), 0.0)
    for family in text_string_to_metric_families(page):
        if family.name in found:
            found[family.name] = sum(
                sample.value for sample in family.samples if not sample.name.endswith("_created")
            )
    return found
