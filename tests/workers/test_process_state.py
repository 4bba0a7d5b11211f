"""A process that stays stopped is ended by the one that watches it; any other goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from workers.process_state import LOOK_S, ProcessState, StopCount, end_once_stopped, process_state


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def test_a_process_that_is_stopped_is_ended_after_the_limit_and_not_before(
    process: subprocess.Popen[bytes],
) -> None:
    thread = end_once_stopped(process.pid, 0.5)
    stopped_s = time.monotonic()

    process.send_signal(signal.SIGSTOP)

    assert process.wait(20) == -signal.SIGKILL
    assert time.monotonic() - stopped_s > 0.5
    thread.join(5)
    assert not thread.is_alive()


def test_the_watch_ends_with_the_process(process: subprocess.Popen[bytes]) -> None:
    thread = end_once_stopped(process.pid, 0.5)
    assert thread.is_alive()

    process.kill()  # and nobody has asked for its end

    thread.join(5)
    assert not thread.is_alive()
    assert process_state(process.pid) == ProcessState.ENDED


def test_one_that_has_ended_cannot_be_watched(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

    with pytest.raises(psutil.NoSuchProcess):
        end_once_stopped(process.pid, 0.5)


def test_stops_that_are_broken_off_do_not_add_up() -> None:
    runs, stopped = ProcessState.RUNS, ProcessState.STOPPED
    count = StopCount(2.5 * LOOK_S)

    told = [count.add(state) for state in (stopped, stopped, runs, stopped, stopped, stopped)]

    assert told == [False] * 5 + [True]
