"""Clusters of benchmarks and tests do not outlive them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STARTS = """
import time
from deploy.served_cluster import ServedCluster
print(ServedCluster("--scripted", "--replicas", "1").process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel does it")
def test_a_cluster_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    cluster = psutil.Process(int(parent.stdout.readline()))

    parent.kill()
    parent.wait()

    cluster.wait(60)
    assert not cluster.is_running()
