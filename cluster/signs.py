"""Signs of life: each rank is asked again and again, and one that gives none for too long is lost.

A process that is stopped answers nothing, nor does a host that is cut off. The system of its host says more, and
sooner: which processes have ended, which are stopped, and which run and are merely slow to answer, on a machine with
more to do than it can; those get more time. Of other hosts' processes ``cluster.node_watch`` hears it. Knows calls and
processes, not ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import psutil

_TICK_S = 0.1
_ASK_TICKS = 2
"""Between an answer and the next question."""
PATIENCE = 10
"""How much longer a process may be silent that is seen to run."""


class ProcessState(Enum):
    """What a system says of a process of its own."""

    RUNS = "runs"
    STOPPED = "is stopped"
    ENDED = "has ended"
    UNKNOWN = "runs elsewhere"
    """Nobody can tell."""


async def wait_for_silence(
    asks: Sequence[Callable[[], Awaitable[object]]],
    looks: Sequence[Callable[[], ProcessState]],
    timeout_s: float,
) -> tuple[int, str]:
    """Return the first who is lost, and what is known of it: "has not answered for 1.1 s".

    Time counts in turns of this loop: while this process itself is stopped, nobody else is silent.

    Args:
        asks: of each, a question that is answered at once; an error is an answer, too.
        looks: of each what is known of its process now.
        timeout_s: for those of which nothing is known. A process that is seen to be stopped gets half of it.
    """
    asked = [asyncio.ensure_future(_settled(ask())) for ask in asks]
    silent_ticks, idle_ticks, stopped_ticks = ([0] * len(asks) for _ in range(3))
    try:
        while True:
            await asyncio.sleep(_TICK_S)
            for index, ask in enumerate(asks):
                state = looks[index]()
                stopped_ticks[index] = stopped_ticks[index] + 1 if state == ProcessState.STOPPED else 0
                if state == ProcessState.ENDED or stopped_ticks[index] * _TICK_S > timeout_s / 2:
                    return index, state.value
                if asked[index].done():
                    silent_ticks[index] = 0
                    idle_ticks[index] += 1
                    if idle_ticks[index] >= _ASK_TICKS:
                        asked[index], idle_ticks[index] = asyncio.ensure_future(_settled(ask())), 0
                    continue
                silent_ticks[index] += 1
                silent_s = silent_ticks[index] * _TICK_S
                if silent_s > timeout_s * (PATIENCE if state == ProcessState.RUNS else 1):
                    return index, f"has not answered for {silent_s:.1f} s"
    finally:
        for future in asked:
            future.cancel()


async def wait_until_stopped(pid: int, stopped_s: float) -> None:
    """Return once a process of this host has been stopped for ``stopped_s`` without a break, counted as above."""
    stopped_ticks = 0
    while stopped_ticks * _TICK_S <= stopped_s:
        await asyncio.sleep(_TICK_S)
        stopped_ticks = stopped_ticks + 1 if process_state(pid) == ProcessState.STOPPED else 0


async def _settled(answer: Awaitable[object]) -> None:
    """End without an error: who has died is found out elsewhere, and sooner."""
    try:
        await answer
    except Exception:  # noqa: BLE001 - see above
        return


def process_state(pid: int) -> ProcessState:
    """What is known of a process of this host."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ProcessState.ENDED
    except psutil.Error:
        return ProcessState.UNKNOWN
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ProcessState.ENDED
    return (
        ProcessState.STOPPED
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        else ProcessState.RUNS
    )
