"""A replica's ranks on another node: what the system there says of their processes, and their end at once.

A watch on that node does no work, so it answers when a rank that computes is late; it tells that a rank is stopped
sooner than the rank's silence does, and sends it SIGKILL, for which Ray takes more than a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import ray

from workers.process_state import ProcessState, process_state

logger = logging.getLogger("ray.serve")

_PERIOD_S = 0.2
_LATE_S = 0.6
"""Without an answer for so long, nothing is known any more."""


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class NodeWatch:
    """One for each other node of a replica's ranks; belongs to the replica and dies with it."""

    def states(self, pids: Sequence[int]) -> list[ProcessState]:
        """What the system of this node says of its processes ``pids``."""
        return [process_state(pid) for pid in pids]

    def kill(self, pids: Sequence[int]) -> None:
        """End them now."""
        for pid in pids:
            kill_process(pid)


class FarProcesses:
    """Those of one node, through its watch."""

    def __init__(
        self,
        pids: Sequence[int],
        ask: Callable[[Sequence[int]], Awaitable[Sequence[ProcessState]]],
        end: Callable[[Sequence[int]], Awaitable[object]],
    ) -> None:
        """Nothing is known before ``look`` runs.

        Args:
            ask: the watch's ``states``.
            end: its ``kill``.
        """
        self._pids = pids
        self._ask = ask
        self._end = end
        self._states: dict[int, ProcessState] = {}
        self._states_before: dict[int, ProcessState] = {}

    def state_of(self, pid: int) -> ProcessState:
        """What was last said of one of ``pids``; UNKNOWN if that is too long ago.

        STOPPED once it was said twice: it is then never said for longer than it was so, however far apart answers are.
        """
        state = self._states.get(pid, ProcessState.UNKNOWN)
        if state == ProcessState.STOPPED and self._states_before.get(pid) != ProcessState.STOPPED:
            return ProcessState.RUNS
        return state

    async def look(self) -> None:
        """Ask for ever."""
        while True:
            try:
                states = await asyncio.wait_for(self._ask(self._pids), _LATE_S)
                told = dict(zip(self._pids, states, strict=True))
            except Exception:  # noqa: BLE001 - a watch that is late, or gone: ranks are asked themselves, too
                told = {}
            self._states_before, self._states = self._states, told
            await asyncio.sleep(_PERIOD_S)

    async def kill(self) -> None:
        """End them now, if their node answers; Ray ends them otherwise, and later."""
        try:
            await asyncio.wait_for(self._end(self._pids), _LATE_S)
        except Exception as error:  # noqa: BLE001 - see above
            logger.info("the watch beside ranks %s did not end them: %r", list(self._pids), error)


def kill_process(pid: int) -> None:
    """SIGKILL a process of this host; of no effect if it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
