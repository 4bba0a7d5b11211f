"""A process that dies without a word is noticed at once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.channel import ChannelExecutor
from workers.channel.link import LOOK_S, listen
from workers.channel.local import RING_BYTES
from workers.engine.errors import RankLost

RANK = """
import sys
from workers.channel import serve_steps
from workers.scripted import ScriptedExecutor
serve_steps(ScriptedExecutor(), sys.argv[1], int(sys.argv[2]))
"""

BRAIN = """
import signal, sys
from workers.channel import ChannelExecutor
executor = ChannelExecutor(sys.argv[1], 1)
executor.wait_for_ranks(30)
print("connected", flush=True)
signal.pause()
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python processes and ends them with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(source: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_lost_at_once_even_while_nothing_runs(
    endpoint: str, spawn: Spawn, victim: int
) -> None:
    executor = ChannelExecutor(endpoint, 2)
    ranks = [spawn(RANK, endpoint, str(rank)) for rank in range(2)]
    executor.wait_for_ranks(60.0)
    killed_s = time.monotonic()

    ranks[victim].send_signal(signal.SIGKILL)

    with pytest.raises(RankLost, match=f"rank {victim} is gone"):
        executor.collect(10.0)
    assert time.monotonic() - killed_s < 1.0
    executor.close()


def test_a_rank_that_is_stopped_is_not_lost_but_late(spawn: Spawn, make_plan, tmp_path: Path) -> None:
    executor = ChannelExecutor(f"unix:@{tmp_path}", 1)
    rank = spawn(RANK, f"unix:@{tmp_path}", "0")
    executor.wait_for_ranks(60.0)

    rank.send_signal(signal.SIGSTOP)
    executor.launch(make_plan(num_rows=0))
    with pytest.raises(RankLost, match="no result within"):
        executor.collect(0.1)

    rank.send_signal(signal.SIGCONT)
    assert executor.collect(10.0).step_id == 0
    executor.close()


def test_who_sends_looks_at_a_rank_that_leaves_no_room_and_may_give_up(spawn: Spawn, tmp_path: Path) -> None:
    endpoint = f"unix:@{tmp_path}"
    brain = listen(endpoint, 2)
    ranks = [spawn(RANK, endpoint, str(rank)) for rank in range(2)]
    brain.wait_for_ranks(60.0)
    ranks[1].send_signal(signal.SIGSTOP)
    started_s = time.monotonic()
    looks_s: list[float] = []

    def look() -> None:
        looks_s.append(time.monotonic() - started_s)
        if len(looks_s) == 2:
            raise RankLost("given up")

    with pytest.raises(RankLost, match="given up"):
        brain.broadcast(bytes(3 * RING_BYTES), look)

    assert 2 * LOOK_S <= looks_s[1] < 4 * LOOK_S + 1.0
    brain.close()


def test_a_rank_that_is_killed_while_it_leaves_no_room_is_lost_at_once(spawn: Spawn, tmp_path: Path) -> None:
    endpoint = f"unix:@{tmp_path}"
    brain = listen(endpoint, 2)
    ranks = [spawn(RANK, endpoint, str(rank)) for rank in range(2)]
    brain.wait_for_ranks(60.0)
    ranks[1].send_signal(signal.SIGSTOP)
    killed_s: list[float] = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        ranks[1].send_signal(signal.SIGKILL)

    with pytest.raises(RankLost, match="rank 1 is gone"):
        brain.broadcast(bytes(3 * RING_BYTES), kill)

    assert time.monotonic() - killed_s[0] < 1.0
    assert len(killed_s) == 1
    brain.close()


def test_over_zeromq_a_rank_that_reads_nothing_holds_nobody_up(spawn: Spawn, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/steps#key"
    brain = listen(endpoint, 1)
    rank = spawn(RANK, endpoint, "0")
    brain.wait_for_ranks(60.0)
    rank.send_signal(signal.SIGSTOP)

    for _ in range(3):
        brain.broadcast(bytes(64 * RING_BYTES))

    assert brain.receive(0.1) is None
    rank.send_signal(signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        brain.receive(10.0)
    brain.close()


def test_a_rank_ends_when_its_brain_is_killed(endpoint: str, spawn: Spawn) -> None:
    brain = spawn(BRAIN, endpoint)
    rank = spawn(RANK, endpoint, "0")
    assert brain.stdout is not None
    assert brain.stdout.readline() == "connected\n"

    brain.send_signal(signal.SIGKILL)

    assert rank.wait(timeout=10) is not None


def test_killed_processes_leave_no_shared_memory_and_no_file(spawn: Spawn, tmp_path: Path) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    brain = spawn(BRAIN, f"unix:{tmp_path}/steps")
    rank = spawn(RANK, f"unix:{tmp_path}/steps", "0")
    assert brain.stdout is not None
    brain.stdout.readline()

    for process in (brain, rank):
        process.kill()
        process.wait()

    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if "shoal-steps" in name]
    assert list(tmp_path.iterdir()) == []
