"""Ranks that are children of the process that uses them: a loss is seen whatever that process waits for."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil
import pytest

from deploy.offline.owned_ranks import OwnedRanks
from workers.channel import serve_steps
from workers.channel.link import new_endpoint
from workers.channel.local import RING_BYTES
from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan
from workers.scripted import ScriptedExecutor


def run_rank(endpoint: str, rank: int) -> None:
    serve_steps(ScriptedExecutor(), endpoint, rank)


@pytest.fixture
def ranks(tmp_path: object) -> Iterator[OwnedRanks]:
    endpoint = new_endpoint(str(tmp_path))
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(endpoint, rank), daemon=True) for rank in range(2)
    ]
    ranks = OwnedRanks(endpoint, 2, processes, "")
    for process in processes:
        process.start()
    ranks.wait_for_ranks(60.0)
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
