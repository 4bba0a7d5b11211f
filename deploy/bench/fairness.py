"""One caller asks for many times its share on a live cluster: what the others notice of it.

Each caller has a key of its own and sends streamed completions at a steady pace, an open loop: who is answered late
asks no less. Two phases on one cluster: the noisy caller asks for its share, then for a multiple of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.bench.http_load import LoadPlan, StreamTimes, run_request
from deploy.bench.report import percentile

NOISY = "noisy"


@dataclass(frozen=True, slots=True)
class FairnessPlan:
    """Paces in requests a second."""

    num_quiet: int
    quiet_per_s: float
    """Of each quiet caller."""
    share_per_s: float
    """Of the noisy one, when it keeps to its share."""
    factor: float
    """By which it exceeds that in the second phase."""
    phase_s: float

    @property
    def quiet(self) -> list[str]:
        """Names of the quiet callers."""
        return [f"quiet-{number}" for number in range(self.num_quiet)]

    def paces(self, factor: float) -> dict[str, float]:
        """Of all callers, the noisy one at ``factor`` times its share."""
        return dict.fromkeys(self.quiet, self.quiet_per_s) | {NOISY: factor * self.share_per_s}


@dataclass(frozen=True, slots=True)
class Phase:
    """What callers saw while the noisy one kept one pace."""

    noisy_per_s: float
    quiet_ttft_p50_ms: float
    quiet_ttft_p99_ms: float
    num_quiet: int
    num_quiet_failed: int
    num_noisy: int
    num_noisy_unanswered: int
    """Refused, or still in line when the phase was over."""
    done_per_s: float
    """Requests of all callers that came to their end, a second."""


@dataclass(frozen=True, slots=True)
class FairnessResult:
    """Both phases."""

    at_share: Phase
    above_it: Phase

    @property
    def ratio(self) -> float:
        """Of the quiet callers' 99th percentiles: above the share to at it."""
        return round(self.above_it.quiet_ttft_p99_ms / self.at_share.quiet_ttft_p99_ms, 2)


def key_of(caller: str) -> str:
    """The API key of a caller, for the key file and for requests."""
    return f"sk-bench-{caller}"


def key_file(plan: FairnessPlan) -> str:
    """The content of the cluster's key file."""
    lines = [f"  - {{name: {one}, key: {key_of(one)}}}" for one in (*plan.quiet, NOISY)]
    return "\n".join(["keys:", *lines]) + "\n"


async def run_fairness(request: LoadPlan, plan: FairnessPlan) -> FairnessResult:
    """Run both phases; ``request`` says what each request is."""
    at_share = await _run_phase(request, plan, 1.0)
    return FairnessResult(at_share, await _run_phase(request, plan, plan.factor))


async def _run_phase(request: LoadPlan, plan: FairnessPlan, factor: float) -> Phase:
    paces = plan.paces(factor)
    started_s = time.perf_counter()
    askers = {
        name: asyncio.create_task(_ask(replace(request, api_key=key_of(name)), name, pace, plan.phase_s))
        for name, pace in paces.items()
    }
    asked = {name: await asker for name, asker in askers.items()}
    await asyncio.gather(*(one for name in plan.quiet for one in asked[name]))
    wall_s = time.perf_counter() - started_s
    # What the noisy caller still has in line would keep a cluster of this size at work for minutes.
    for one in asked[NOISY]:
        one.cancel()
    await asyncio.gather(*asked[NOISY], return_exceptions=True)
    times = {name: [_times(one) for one in of_caller] for name, of_caller in asked.items()}
    return phase_of(times, paces[NOISY], wall_s)


def _times(request: asyncio.Task[StreamTimes]) -> StreamTimes:
    """Of a request that has ended; of one that was given up, that it was not answered."""
    return StreamTimes(0.0) if request.cancelled() or request.exception() else request.result()


def phase_of(times: Mapping[str, Sequence[StreamTimes]], noisy_per_s: float, wall_s: float) -> Phase:
    """Sum up what all callers saw."""
    quiet = [one for name, of_caller in times.items() if name != NOISY for one in of_caller]
    firsts = [1e3 * (one.arrivals_s[0] - one.sent_s) for one in quiet if one.arrivals_s]
    noisy = times[NOISY]
    num_done = sum(one.is_done for of_caller in times.values() for one in of_caller)
    return Phase(
        noisy_per_s=round(noisy_per_s, 2),
        quiet_ttft_p50_ms=round(percentile(firsts, 0.5), 1) if firsts else 0.0,
        quiet_ttft_p99_ms=round(percentile(firsts, 0.99), 1) if firsts else 0.0,
        num_quiet=len(quiet),
        num_quiet_failed=sum(not one.is_done for one in quiet),
        num_noisy=len(noisy),
        num_noisy_unanswered=sum(not one.is_done for one in noisy),
        done_per_s=round(num_done / wall_s, 2),
    )


async def _ask(request: LoadPlan, name: str, per_s: float, for_s: float) -> list[asyncio.Task[StreamTimes]]:
    """Send requests at random moments, ``per_s`` a second on average; they may still run when this returns."""
    rng = random.Random(name)
    started_s = time.perf_counter()
    asked: list[asyncio.Task[StreamTimes]] = []
    at_s = rng.expovariate(per_s)
    while at_s < for_s:
        await asyncio.sleep(started_s + at_s - time.perf_counter())
        asked.append(asyncio.create_task(run_request(request, rng)))
        at_s += rng.expovariate(per_s)
    return asked
