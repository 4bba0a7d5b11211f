"""``shoal serve`` is told to stop before it is up, at any moment: it ends at once, without a word too many."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy.served_cluster import ServedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NOISE = re.compile(
    r"Traceback|handler is not set|\*\*\*|Exception ignored|Aborted|Fatal|core dumped|error", re.IGNORECASE
)


def has_mapped(word: str) -> Callable[[ServedCluster], bool]:
    """Whether the command's own process has loaded a library."""

    def has(cluster: ServedCluster) -> bool:
        return word in Path(f"/proc/{cluster.process.pid}/maps").read_text()

    return has


def runs(word: str) -> Callable[[ServedCluster], bool]:
    """Whether the cluster has a process of this name."""
    return lambda cluster: bool(cluster.processes(word))


def is_told(word: str) -> Callable[[ServedCluster], bool]:
    """Whether the command has said so."""
    return lambda cluster: any(word in line for line in cluster.log)


def wait_for(condition: Callable[[ServedCluster], bool], cluster: ServedCluster) -> None:
    deadline = time.monotonic() + 240
    while not condition(cluster):
        assert cluster.process.poll() is None, "".join(cluster.log)
        assert time.monotonic() < deadline, "".join(cluster.log)
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(has_mapped("pydantic_core"), signal.SIGINT, id="imports"),
        pytest.param(runs("raylet"), signal.SIGTERM, id="ray"),
        pytest.param(runs("gcs_server"), signal.SIGINT, id="ray-early", marks=pytest.mark.slow),
        pytest.param(is_told("Model"), signal.SIGTERM, id="model", marks=pytest.mark.slow),
        pytest.param(runs("ServeController"), signal.SIGTERM, id="serve", marks=pytest.mark.slow),
        pytest.param(runs("RankActor"), signal.SIGINT, id="ranks", marks=pytest.mark.slow),
        pytest.param(runs("workers.brain"), signal.SIGTERM, id="brain", marks=pytest.mark.slow),
    ],
)
def test_it_ends_quietly_and_leaves_nothing(
    start_cluster: Callable[..., ServedCluster],
    moment: Callable[[ServedCluster], bool],
    number: signal.Signals,
) -> None:
    cluster = start_cluster("--replicas", "1", "--cpu-threads", "1")
    runtime = cluster.runtime
    wait_for(moment, cluster)

    code = cluster.stop(number)

    assert code in (128 + number, -number), "".join(cluster.log)
    assert not NOISE.search("".join(cluster.log)), "".join(cluster.log)
    assert runtime.processes() == []
    assert not runtime.folder.exists()


@pytest.mark.slow
def test_a_signal_to_its_whole_group_while_it_connects_to_ray_leaves_ray_to_it(
    start_cluster: Callable[..., ServedCluster],
) -> None:
    """As ``timeout`` sends it: Ray's driver waits half a minute for a raylet that has heard it, too, or aborts."""
    cluster = start_cluster("--replicas", "1", "--cpu-threads", "1")
    runtime = cluster.runtime
    wait_for(runs("raylet"), cluster)
    daemons = [*cluster.processes("gcs_server"), *cluster.processes("raylet")]
    assert all(os.getpgid(daemon.pid) != cluster.process.pid for daemon in daemons)
    started_s = time.monotonic()

    os.killpg(cluster.process.pid, signal.SIGTERM)

    assert cluster.process.wait(60) == 143, "".join(cluster.log)
    assert time.monotonic() - started_s < 20
    assert cluster.stop() == 143  # its output has been read to the end
    assert "Stopped before it was up" in "".join(cluster.log)
    assert not NOISE.search("".join(cluster.log)), "".join(cluster.log)
    assert runtime.processes() == []
    assert not runtime.folder.exists()


@pytest.mark.slow
def test_a_second_signal_in_the_middle_of_that_leaves_nothing_either(
    start_cluster: Callable[..., ServedCluster],
) -> None:
    cluster = start_cluster("--replicas", "1", "--cpu-threads", "1")
    runtime = cluster.runtime
    wait_for(runs("ServeController"), cluster)
    for _ in range(3):
        os.killpg(cluster.process.pid, signal.SIGINT)
        time.sleep(0.05)  # the pace of an impatient user, not a wait for anything

    assert cluster.stop() == 130, "".join(cluster.log)
    psutil.wait_procs(runtime.processes(), timeout=10)
    assert runtime.processes() == []
    assert not runtime.folder.exists()
    assert not NOISE.search("".join(cluster.log)), "".join(cluster.log)
