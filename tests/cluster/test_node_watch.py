"""What is known of another node's processes is what its watch last said, and nothing once it is late."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence

from cluster.node_watch import FarProcesses, kill_process
from workers.process_state import ProcessState


class Watch:
    """One whose answers the test gives."""

    def __init__(self) -> None:
        self.state = ProcessState.RUNS
        self.is_there = True
        self.ended: list[int] = []

    async def states(self, pids: Sequence[int]) -> list[ProcessState]:
        await self._answer()
        return [self.state] * len(pids)

    async def kill(self, pids: Sequence[int]) -> None:
        await self._answer()
        self.ended += pids

    async def _answer(self) -> None:
        if not self.is_there:
            await asyncio.get_running_loop().create_future()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - what is waited for is a value
            await asyncio.sleep(0.01)


async def test_the_last_word_of_the_watch_holds_until_it_is_late() -> None:
    watch = Watch()
    far = FarProcesses([5, 7], watch.states, watch.kill)
    assert far.state_of(7) == ProcessState.UNKNOWN
    looking = asyncio.ensure_future(far.look())

    await until(lambda: far.state_of(7) == ProcessState.RUNS)
    watch.state = ProcessState.STOPPED
    await until(lambda: far.state_of(5) == ProcessState.STOPPED)
    watch.is_there = False
    await until(lambda: far.state_of(5) == ProcessState.UNKNOWN)
    watch.is_there = True
    await until(lambda: far.state_of(5) == ProcessState.STOPPED)

    looking.cancel()


async def test_a_process_is_stopped_once_the_watch_has_said_so_twice() -> None:
    """A stop that is shorter than it looks from afar must not count as a long one."""
    said = [ProcessState.RUNS, ProcessState.STOPPED, ProcessState.STOPPED, ProcessState.RUNS]
    seen: list[ProcessState] = []

    async def states(pids: Sequence[int]) -> list[ProcessState]:
        seen.append(far.state_of(5))  # after the answer before
        if not said:
            await asyncio.get_running_loop().create_future()
        return [said.pop(0)]

    far = FarProcesses([5], states, Watch().kill)
    looking = asyncio.ensure_future(far.look())

    await until(lambda: len(seen) == 5)
    looking.cancel()
    runs, stopped = ProcessState.RUNS, ProcessState.STOPPED
    assert seen == [ProcessState.UNKNOWN, runs, runs, stopped, runs]


async def test_ranks_are_ended_by_the_watch_and_a_node_that_is_silent_holds_nobody_up() -> None:
    watch = Watch()
    far = FarProcesses([5, 7], watch.states, watch.kill)

    await far.kill()
    watch.is_there = False
    await asyncio.wait_for(far.kill(), 20)

    assert watch.ended == [5, 7]


def test_a_process_that_has_ended_may_be_killed_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    kill_process(process.pid)
    process.wait()

    kill_process(process.pid)
