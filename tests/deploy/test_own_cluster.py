"""Commands with a cluster of their own end it when they are told to stop, wherever they are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer

from deploy.own_cluster import own_cluster, run_on
from deploy.runtime import Runtime

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Started:
    """A cluster that notes what becomes of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stop(self) -> None:
        """Note it."""
        self.notes.append("stopped")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_cluster_and_then_the_command(number: signal.Signals, code: int) -> None:
    cluster = Started()

    @own_cluster()
    def command() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            cluster.stop()

    with pytest.raises(typer.Exit) as ended:
        command()

    assert ended.value.exit_code == code
    assert cluster.notes == ["stopped"]


def test_a_failure_stays_one_and_signals_do_afterwards_what_they_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(ValueError, match="broken"), own_cluster():
        raise ValueError("broken")

    assert signal.getsignal(signal.SIGTERM) == before
    with own_cluster():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


def test_load_on_a_cluster_is_interrupted_in_any_task_and_what_changes_it_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Started()

    def change() -> None:
        """As a rollout does, whose replicas never come."""
        deadline = time.monotonic() + 30
        while not cluster.notes and time.monotonic() < deadline:
            time.sleep(0.01)
        cluster.notes.append("not changed")

    async def nobody_waits_for_this() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def load() -> None:
        changing = asyncio.create_task(asyncio.to_thread(change))
        beside = asyncio.create_task(nobody_waits_for_this())
        await asyncio.wait([changing])
        await beside

    with pytest.raises(typer.Exit):
        own_cluster()(run_on)(cluster, load())

    assert cluster.notes == ["stopped", "not changed"]
    gc.collect()
    assert not caplog.messages  # asyncio would tell of a task whose failure nobody asked for


def has_child(process: psutil.Process, word: str) -> bool:
    """Whether it has one of this name, at any depth."""
    for one in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if word in " ".join(one.cmdline()):
                return True
    return False


def left_by(heads: list[Runtime]) -> list[psutil.Process]:
    return [process for runtime in heads for process in runtime.processes()]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("command", "moment", "number"),
    [
        pytest.param(("bench", "chaos", "--replicas", "2"), "raylet", signal.SIGTERM, id="chaos"),
        pytest.param(
            ("bench", "chaos", "--replicas", "2"),
            "deploy.ray_head",
            signal.SIGINT,
            id="early",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("bench", "chaos", "--replicas", "2"),
            "RankActor",
            signal.SIGTERM,
            id="ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(("bench", "soak"), "ServeController", signal.SIGTERM, id="soak", marks=pytest.mark.slow),
        pytest.param(
            ("bench", "soak", "--rollout"),
            "ServeController",
            signal.SIGINT,
            id="rollout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("run-batch", "--model", "demo", "-i", "{folder}/batch.jsonl", "-o", "/dev/null"),
            *("raylet", signal.SIGTERM),
            id="run-batch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("bench", "scale-step"), "raylet", signal.SIGTERM, id="scale-step", marks=pytest.mark.slow
        ),
        pytest.param(("bench", "fairness"), "raylet", signal.SIGTERM, id="fairness", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_told_to_stop_leaves_nothing(
    tmp_path: Path, command: tuple[str, ...], moment: str, number: signal.Signals
) -> None:
    """As ``timeout`` and Ctrl-C tell it: its whole group."""
    (tmp_path / "batch.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "Hi"}}'
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = psutil.Popen(
        [sys.executable, "-m", "shoal", *(word.format(folder=tmp_path) for word in command)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not has_child(process, moment):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    clusters = [runtime for one in (process, *process.children()) for runtime in Runtime.of_driver(one.pid)]

    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=90)

    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert "no process is left" in said
    assert left_by(clusters) == []
    assert [runtime for runtime in clusters if runtime.folder.exists()] == []
    assert list(temporary.iterdir()) == []
