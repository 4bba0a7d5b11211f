"""Who is silent is found soon, who is slow is not given up, and a pause of one's own proves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from cluster.signs import wait_for_silence, wait_until_stopped
from workers.process_state import ProcessState, process_state


async def answer() -> None:
    """At once."""


async def silence() -> None:
    """For ever."""
    await asyncio.get_running_loop().create_future()


def unknown() -> ProcessState:
    """Of a process elsewhere."""
    return ProcessState.UNKNOWN


def look_at(pid: int) -> Callable[[], ProcessState]:
    return lambda: process_state(pid)


def after(num_answers: int) -> Callable[[], Awaitable[unknown]]:
    """One that answers so often and then no more."""
    left = [num_answers]

    def ask() -> Awaitable[unknown]:
        left[0] -= 1
        return answer() if left[0] >= 0 else silence()

    return ask


async def test_one_of_another_host_that_falls_silent_is_found_within_the_limit() -> None:
    started_s = time.monotonic()

    # A busy machine may take its time, but not for ever.
    found = await asyncio.wait_for(wait_for_silence([answer, after(1)], [unknown, unknown], 0.3), 20)

    assert found[0] == 1
    assert time.monotonic() - started_s > 0.3


async def test_a_stopped_process_is_found_and_a_running_one_gets_more_time() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(sleeper) for _ in range(2)]  # noqa: ASYNC220 - it takes milliseconds
    try:
        pids = [process.pid for process in processes]
        waiting = asyncio.ensure_future(wait_for_silence([silence, answer], [*map(look_at, pids)], 0.2))
        assert not (await asyncio.wait([waiting], timeout=0.8))[0]  # both run

        os.kill(pids[1], signal.SIGSTOP)

        assert await asyncio.wait_for(waiting, 5) == (1, "is stopped")
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def test_a_process_that_has_ended_is_found_whatever_its_last_answer() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: ASYNC220 - milliseconds
    waiting = asyncio.ensure_future(wait_for_silence([answer], [look_at(process.pid)], 30.0))
    assert not (await asyncio.wait([waiting], timeout=0.3))[0]

    process.kill()  # and nobody has asked for its end: it is still in the table of processes

    assert await asyncio.wait_for(waiting, 5) == (0, "has ended")
    process.wait()


async def test_a_stop_counts_from_its_beginning_and_a_short_one_not_at_all() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: ASYNC220 - milliseconds
    try:
        waiting = asyncio.ensure_future(wait_until_stopped(process.pid, 1.0))
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
        assert not waiting.done()

        process.send_signal(signal.SIGSTOP)

        await asyncio.wait_for(waiting, 20)
    finally:
        process.kill()
        process.wait()


async def test_an_error_is_a_sign_of_life() -> None:
    async def fail() -> None:
        raise RuntimeError("not now")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_for_silence([fail], [unknown], 0.2), 1.0)


async def test_time_in_which_this_process_does_not_run_is_nobodys_silence() -> None:
    """The answer is ready, but the loop had no time to take it."""
    waiting = asyncio.ensure_future(wait_for_silence([answer], [unknown], 0.3))
    await asyncio.sleep(0.05)

    time.sleep(0.6)  # noqa: ASYNC251 - the pause is what is tested
    await asyncio.sleep(0.25)

    assert not waiting.done()
    waiting.cancel()
