"""Processes of a running cluster, found from outside as an operator would: by title, and by being at work."""

from __future__ import annotations

import time

import psutil

from deploy.runtime import Runtime
from workers.engine.errors import ShoalError

_WORKING_SWITCHES = 5
"""Voluntary context switches within seconds that only a process at work makes."""


def processes_of(runtime: Runtime, word: str) -> list[psutil.Process]:
    """Processes of the cluster with ``word`` in their command line or title."""
    found = []
    for process in runtime.processes():
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def busiest(runtime: Runtime, word: str, timeout_s: float = 10.0) -> psutil.Process:
    """Of the processes with ``word`` in their title, the one that is at work for a stream.

    Raises:
        ShoalError: there is none, or all are idle.
    """
    processes = processes_of(runtime, word)
    # Each step wakes rank, brain and replica once; how much CPU that takes differs too much to tell them by.
    before = {process: process.num_ctx_switches().voluntary for process in processes}
    deadline = time.monotonic() + timeout_s
    while processes and time.monotonic() < deadline:
        woken = {one: one.num_ctx_switches().voluntary - before[one] for one in processes}
        process = max(woken, key=lambda one: woken[one])
        if woken[process] >= _WORKING_SWITCHES:
            return process
    raise ShoalError(f"{len(processes)} processes with {word} in their title, none is at work")
