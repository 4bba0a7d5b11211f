"""Signs of life: each rank is asked again and again, and one that gives none for too long is lost.

A process that is stopped answers nothing, nor does a host that is cut off. One that runs on this host and is merely
slow to answer, on a machine with more to do than it can, gets more time. Knows calls and processes, not ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import psutil

_TICK_S = 0.1
_ASK_TICKS = 4
"""Between an answer and the next question."""
_PATIENCE = 10
"""How much longer a process may be silent that is seen to run."""


async def wait_for_silence(
    asks: Sequence[Callable[[], Awaitable[object]]], pids: Sequence[int | None], timeout_s: float
) -> tuple[int, float]:
    """Return the first who has not answered for ``timeout_s``, and for how long.

    Time counts in turns of this loop: while this process itself is stopped, nobody else is silent.

    Args:
        asks: of each, a question that is answered at once; an error is an answer, too.
        pids: of each its process, None on another host.
        timeout_s: for those that do not run, or of which nothing is known.
    """
    asked = [asyncio.ensure_future(_settled(ask())) for ask in asks]
    silent_ticks, idle_ticks = [0] * len(asks), [0] * len(asks)
    try:
        while True:
            await asyncio.sleep(_TICK_S)
            for index, ask in enumerate(asks):
                if asked[index].done():
                    silent_ticks[index] = 0
                    idle_ticks[index] += 1
                    if idle_ticks[index] >= _ASK_TICKS:
                        asked[index], idle_ticks[index] = asyncio.ensure_future(_settled(ask())), 0
                    continue
                silent_ticks[index] += 1
                silent_s = silent_ticks[index] * _TICK_S
                if silent_s > timeout_s and (silent_s > _PATIENCE * timeout_s or not _runs(pids[index])):
                    return index, silent_s
    finally:
        for future in asked:
            future.cancel()


async def _settled(answer: Awaitable[object]) -> None:
    """End without an error: who has died is found out elsewhere, and sooner."""
    try:
        await answer
    except Exception:  # noqa: BLE001 - see above
        return


def _runs(pid: int | None) -> bool:
    """True if it is a process of this host that is neither stopped nor dead."""
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() not in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    except psutil.Error:
        return False
