"""What Ray reports is told in a line, and an ended cluster does not come back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.ray_driver import agent_on_any_port, short_report, start_no_more
from workers.engine.errors import ShoalError

LOGS = Path("/tmp/shoal-1-2/ray/session_latest/logs")
DEAD = (
    "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker. Lease ID: 01 Worker ID: 02 Node ID: 03 Worker IP "
    "address: 127.0.0.1 Worker port: 10005 Worker PID: 4711 Worker exit type: SYSTEM_ERROR Worker exit detail: There "
    "are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."
)


def test_a_process_that_died_is_told_by_its_number_and_where_its_log_is() -> None:
    assert short_report(DEAD, LOGS) == f"Process 4711 of the cluster has died; logs: {LOGS}"


def test_of_any_other_report_the_first_line_is_told() -> None:
    told = short_report("\n2 tasks were killed: the node ran low on memory.\nRefer to ...", LOGS)

    assert told == f"Ray says: 2 tasks were killed: the node ran low on memory.; logs: {LOGS}"
    assert len(short_report("x" * 5000, LOGS)) < 300


def test_the_agents_of_two_clusters_need_not_share_a_port() -> None:
    from ray._private import parameter

    with agent_on_any_port():
        assert parameter.RayParams(num_cpus=1).dashboard_agent_listen_port == 0

    assert parameter.RayParams().dashboard_agent_listen_port != 0


def test_a_thread_that_still_deploys_cannot_start_what_was_ended() -> None:
    """Ray starts by itself where an API is called without it."""
    ray = SimpleNamespace(init=lambda: pytest.fail("a new cluster was started"))

    start_no_more(ray)

    with pytest.raises(ShoalError, match="is being ended"):
        ray.init(namespace="serve")
