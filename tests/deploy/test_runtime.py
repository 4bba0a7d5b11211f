"""What a killed driver leaves behind is found by its mark and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy.runtime import RUNTIME_DIR_VARIABLE, Runtime, find_free_ports, port_is_free


def start_marked(runtime: Runtime, code: str = "import time; time.sleep(600)") -> subprocess.Popen[bytes]:
    """A process that belongs to ``runtime`` and has begun to run."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"print('up', flush=True); {code}"],
        env={**os.environ, RUNTIME_DIR_VARIABLE: str(runtime.folder)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    found = Runtime(tmp_path / "runtime")
    found.create()
    return found


def test_a_sweep_ends_the_processes_of_its_cluster_and_no_others(runtime: Runtime, tmp_path: Path) -> None:
    other = Runtime(tmp_path / "other")
    ours, theirs = start_marked(runtime), start_marked(other)

    assert runtime.sweep() == 1

    assert not psutil.pid_exists(ours.pid)
    assert theirs.poll() is None
    theirs.kill()
    theirs.wait()


def test_one_that_has_lost_mark_and_parent_is_known_by_its_log(runtime: Runtime, tmp_path: Path) -> None:
    """As Ray's agents do: they write their title over their environment, and outlive a raylet that is killed."""
    (tmp_path / "other").mkdir()
    ours, theirs = (
        subprocess.Popen(
            [sys.executable, "-c", "import sys; log = open(sys.argv[1], 'w'); print('up', flush=True); input()",
             str(folder / "agent.log")],
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for folder in (runtime.folder, tmp_path / "other")
    )  # fmt: skip
    for one in (ours, theirs):
        assert one.stdout is not None
        assert one.stdout.readline() == b"up\n"

    assert [process.pid for process in runtime.processes()] == [ours.pid]

    runtime.sweep()
    assert theirs.poll() is None
    theirs.communicate(b"\n")


def test_a_stopped_process_is_ended_too(runtime: Runtime) -> None:
    process = start_marked(runtime)
    psutil.Process(process.pid).suspend()

    runtime.sweep(grace_s=0.1)

    assert not psutil.pid_exists(process.pid)


def test_the_reaper_ends_a_cluster_whose_driver_is_killed(runtime: Runtime) -> None:
    left_behind = start_marked(runtime)
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\nfrom deploy.reaper import start_reaper\n"
            "from deploy.runtime import Runtime\npipe = start_reaper(Runtime(Path(sys.argv[1])))\n"
            "print('up', flush=True)\ntime.sleep(600)",
            str(runtime.folder),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"up\n"

    driver.kill()
    driver.wait()

    assert left_behind.wait(30) != 0


def test_leftovers_are_the_clusters_of_dead_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deploy.runtime._BASE", tmp_path)
    alive = Runtime.of_port(8000)
    alive.create()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = Runtime(alive.folder.with_name(alive.folder.name.replace(str(os.getpid()), str(ended.pid))))
    dead.create()

    assert Runtime.leftovers() == [dead]


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert not port_is_free("127.0.0.1", port)
        assert port not in find_free_ports("127.0.0.1", 2, port)
