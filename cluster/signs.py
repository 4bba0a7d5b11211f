"""Signs of life: each rank is asked again and again, and one that gives none for too long is lost.

A process that is stopped answers nothing, nor does a host that is cut off. The system of its host says more, and
sooner: which processes have ended, which are stopped, and which run and are merely slow to answer, on a machine with
more to do than it can; those get more time. Of other hosts' processes ``cluster.node_watch`` hears it. Knows calls and
processes, not ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from workers.process_state import LOOK_S, ProcessState, StopCount, process_state

_ASK_TICKS = 2
"""Between an answer and the next question."""
PATIENCE = 10
"""How much longer a process may be silent that is seen to run."""


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
    silent_ticks, idle_ticks = ([0] * len(asks) for _ in range(2))
    stops = [StopCount(timeout_s / 2) for _ in asks]
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            for index, ask in enumerate(asks):
                state = looks[index]()
                if stops[index].add(state) or state == ProcessState.ENDED:
                    return index, state.value
                if asked[index].done():
                    silent_ticks[index] = 0
                    idle_ticks[index] += 1
                    if idle_ticks[index] >= _ASK_TICKS:
                        asked[index], idle_ticks[index] = asyncio.ensure_future(_settled(ask())), 0
                    continue
                silent_ticks[index] += 1
                silent_s = silent_ticks[index] * LOOK_S
                if silent_s > timeout_s * (PATIENCE if state == ProcessState.RUNS else 1):
                    return index, f"has not answered for {silent_s:.1f} s"
    finally:
        for future in asked:
            future.cancel()


async def wait_until_stopped(pid: int, stopped_s: float) -> None:
    """Return once a process of this host has been stopped for ``stopped_s`` without a break, counted as above."""
    count = StopCount(stopped_s)
    while True:
        await asyncio.sleep(LOOK_S)
        if count.add(process_state(pid)):
            return


async def _settled(answer: Awaitable[object]) -> None:
    """End without an error: who has died is found out elsewhere, and sooner."""
    try:
        await answer
    except Exception:  # noqa: BLE001 - see above
        return
