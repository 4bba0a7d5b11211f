"""Ranks that are children of the process that uses them: a loss is seen whatever that process waits for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import pytest

from cluster.signs import ProcessState, process_state
from deploy.offline import owned_ranks
from deploy.offline.owned_ranks import OwnedRanks
from workers.channel import local, serve_steps
from workers.channel.link import new_endpoint
from workers.channel.local import RING_BYTES
from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan
from workers.scripted import ScriptedExecutor


class WaitingExecutor(ScriptedExecutor):
    """Begins no plan, and its rank reads none, until ``may_compute`` is set."""

    def __init__(self, may_compute: Event) -> None:
        super().__init__()
        self._may_compute = may_compute

    def launch(self, plan: StepPlan) -> None:
        self._may_compute.wait()
        super().launch(plan)


def run_rank(endpoint: str, rank: int, may_compute: Event | None) -> None:
    executor = ScriptedExecutor() if may_compute is None else WaitingExecutor(may_compute)
    serve_steps(executor, endpoint, rank)


def start_ranks(folder: str, rendezvous: str, may_compute: Event | None = None) -> OwnedRanks:
    endpoint = new_endpoint(folder)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(endpoint, rank, may_compute), daemon=True) for rank in range(2)
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


@pytest.fixture
def may_compute() -> Event:
    return multiprocessing.get_context("spawn").Event()


@pytest.fixture
def waiting_ranks(tmp_path: Path, may_compute: Event) -> Iterator[OwnedRanks]:
    """They have one plan, and read no other before ``may_compute``."""
    ranks = start_ranks(str(tmp_path), "", may_compute)
    ranks.launch(plan_of(0))
    yield ranks
    ranks.kill()


def plan_of(num_rows: int) -> StepPlan:
    """Of ``num_rows`` bytes and more, with that number as its id."""
    rows = list(range(num_rows))
    return StepPlan(num_rows, [], rows, [5] * num_rows, [1] * num_rows, [False] * num_rows, [[]] * num_rows)


def run(ranks: OwnedRanks, num_rows: int) -> None:
    ranks.launch(plan_of(num_rows))
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


@pytest.fixture
def at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What happens once, when ranks are looked at since they have read nothing, or told nothing, for a while.

    SIGINT raises meanwhile, also where the shell has it ignored, as that of a job in the background.
    """
    todo: list[Callable[[], object]] = []

    def look(pid: int) -> ProcessState:
        for action in [todo.pop() for _ in range(len(todo))]:
            action()
        return process_state(pid)

    monkeypatch.setattr(owned_ranks, "process_state", look)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield todo
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """As Ctrl-C does to a process that is alone in its group."""
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_cuts_a_plan_off_ends_the_ranks(
    waiting_ranks: OwnedRanks, at_the_first_look: list[Callable[[], object]]
) -> None:
    processes = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    at_the_first_look.append(interrupt)

    with pytest.raises(KeyboardInterrupt):
        waiting_ranks.launch(plan_of(RING_BYTES))

    assert len(processes) == 2
    assert not any(process.is_running() for process in processes)
    for ask in (lambda: waiting_ranks.launch(plan_of(0)), waiting_ranks.collect):
        with pytest.raises(RankLost, match="cut off by KeyboardInterrupt; all 2 ranks were ended"):
            ask()
    started_s = time.monotonic()
    waiting_ranks.close()
    assert time.monotonic() - started_s < 1.0


def test_an_interrupt_amid_a_plan_that_ranks_go_on_to_read_strikes_after_it(
    waiting_ranks: OwnedRanks,
    may_compute: Event,
    at_the_first_look: list[Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt_and_go_on() -> None:
        monkeypatch.setattr(local, "LOOK_S", 60.0)  # however long a busy machine takes
        may_compute.set()
        interrupt()

    at_the_first_look.append(interrupt_and_go_on)

    with pytest.raises(KeyboardInterrupt):
        waiting_ranks.launch(plan_of(RING_BYTES))

    assert [waiting_ranks.collect(60.0).step_id for _ in range(2)] == [0, RING_BYTES]
    run(waiting_ranks, 3)


def test_an_interrupt_while_a_result_is_awaited_takes_nothing_of_it(
    waiting_ranks: OwnedRanks, may_compute: Event, at_the_first_look: list[Callable[[], object]]
) -> None:
    at_the_first_look.append(interrupt)

    with pytest.raises(KeyboardInterrupt):
        waiting_ranks.collect()

    may_compute.set()
    waiting_ranks.collect(30.0)
    run(waiting_ranks, 3)


def test_a_result_of_a_plan_that_was_never_sent_is_not_waited_for(ranks: OwnedRanks) -> None:
    run(ranks, 3)

    with pytest.raises(RankLost, match="an interrupt kept from the ranks; all 2 ranks were ended"):
        ranks.collect(5.0)


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
