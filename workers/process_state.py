"""What the system of a host says of its processes, and the end of one that it says is stopped.

A process that is stopped (SIGSTOP, a debugger) does nothing, its own end included: another one must see to that.
Knows processes of its own host, not what they are for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from enum import Enum

import psutil

log = logging.getLogger("shoal.processes")

LOOK_S = 0.1
"""Between two looks at a process."""


class ProcessState(Enum):
    """What a system says of a process of its own."""

    RUNS = "runs"
    STOPPED = "is stopped"
    ENDED = "has ended"
    UNKNOWN = "runs elsewhere"
    """Nobody can tell."""


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


class StopCount:
    """For how long a process has been stopped without a break, in looks ``LOOK_S`` apart.

    Looks count and no clock does: while the one who looks is itself stopped, nobody else has been.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_looks = 0

    def add(self, state: ProcessState) -> bool:
        """Count a look; True if the process has now been stopped for longer than the limit."""
        self._num_looks = self._num_looks + 1 if state == ProcessState.STOPPED else 0
        return self._num_looks * LOOK_S > self._limit_s


def end_once_stopped(pid: int, stopped_s: float) -> threading.Thread:
    """SIGKILL a process of this host once it has been stopped for ``stopped_s`` without a break.

    Returns:
        The thread that looks, until the process has ended or this one does.
    """
    # Knows when the process began, so that another one that is given its number later is left alone.
    process = psutil.Process(pid)
    thread = threading.Thread(target=_end_once_stopped, args=(process, stopped_s), daemon=True)
    thread.start()
    return thread


def _end_once_stopped(process: psutil.Process, stopped_s: float) -> None:
    count = StopCount(stopped_s)
    while (state := process_state(process.pid)) != ProcessState.ENDED:
        if count.add(state):
            log.error("process %d has been stopped for %.1f s: it is ended", process.pid, stopped_s)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            return
        time.sleep(LOOK_S)
