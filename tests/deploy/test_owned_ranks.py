"""Ranks that are children of the process that uses them: a loss is seen whatever that process waits for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from cluster.signs import ProcessState, process_state
from deploy.offline import owned_ranks
from deploy.offline.owned_ranks import OwnedRanks
from workers.channel import serve_steps
from workers.channel.link import new_endpoint
from workers.channel.local import RING_BYTES
from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan
from workers.scripted import ScriptedExecutor


def run_rank(endpoint: str, rank: int) -> None:
    serve_steps(ScriptedExecutor(), endpoint, rank)


def start_ranks(folder: str, rendezvous: str) -> OwnedRanks:
    endpoint = new_endpoint(folder)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(endpoint, rank), daemon=True) for rank in range(2)
    ]
    ranks = OwnedRanks(endpoint, 2, processes, rendezvous)
    for process in processes:
        process.start()
    ranks.wait_for_ranks(60.0)
    return ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[OwnedRanks]:
    ranks = start_ranks(str(tmp_path), "")
    yield ranks
    ranks.kill()


def run(ranks: OwnedRanks, num_rows: int) -> None:
    rows = list(range(num_rows))
    ranks.launch(StepPlan(0, [], rows, [5] * num_rows, [1] * num_rows, [True] * num_rows, [[]] * num_rows))
    ranks.collect()


@pytest.mark.parametrize("num_rows", [0, RING_BYTES], ids=["short", "longer than the ring"])
@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "killed by SIGKILL")]
)
def test_a_rank_that_is_lost_while_a_plan_is_sent_ends_all(
    ranks: OwnedRanks, num_rows: int, number: signal.Signals, says: str
) -> None:
    processes = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    victim = min(processes, key=lambda process: process.pid)  # rank 0, without which there is no result

    victim.send_signal(number)
    started_s = time.monotonic()
    with pytest.raises(
        RankLost, match=rf"rank 0 .*process {victim.pid}\) .*{says}.*; all 2 ranks were ended"
    ):
        run(ranks, num_rows)

    assert time.monotonic() - started_s < 4.0
    assert not any(process.is_running() for process in processes)


def test_a_rank_that_is_stopped_again_and_again_for_a_moment_is_not_lost(
    ranks: OwnedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[int] = []

    def let_go_on(pid: int) -> ProcessState:
        state = process_state(pid)
        if state == ProcessState.STOPPED:
            stops.append(pid)
            os.kill(pid, signal.SIGCONT)
        return state

    monkeypatch.setattr(owned_ranks, "process_state", let_go_on)
    pids = sorted(process.pid or 0 for process in multiprocessing.active_children())

    for _ in range(2):
        os.kill(pids[0], signal.SIGSTOP)
        run(ranks, 0)

    assert stops == [pids[0]] * 2


PROGRAM = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
from workers.model.rendezvous import new_rendezvous
from {module} import start_ranks

if __name__ == "__main__":
    rendezvous = new_rendezvous()
    Path(rendezvous.removeprefix("file://")).touch()
    ranks = start_ranks(sys.argv[1], rendezvous)
    print(*(child.pid for child in active_children()), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("pass", id="at its last line"),
        pytest.param("raise SystemExit('an error')", id="with an error"),
        pytest.param("ranks.held_by = ranks", id="with the ranks in a cycle"),
        pytest.param(
            "del ranks; assert not active_children(); os._exit(0)", id="after it let go of the ranks"
        ),
        pytest.param("os.kill(active_children()[0].pid, signal.SIGSTOP)", id="while a rank is stopped"),
    ],
)
def test_a_program_that_ends_without_close_leaves_neither_ranks_nor_files(end: str, tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "tmp"
    folder.mkdir()
    program.write_text(PROGRAM.format(module=Path(__file__).stem, end=end))
    here = Path(__file__)

    ended = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{here.parents[2]}:{here.parent}"},
        capture_output=True,
        text=True,
        timeout=30,
    )

    ranks = [int(pid) for pid in ended.stdout.split()]
    assert len(ranks) == 2
    assert not any(psutil.pid_exists(rank) for rank in ranks)
    assert list(folder.iterdir()) == []
    assert "Traceback" not in ended.stderr
