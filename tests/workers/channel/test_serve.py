from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers.channel import BrainLost, ChannelExecutor, serve_steps
from workers.engine.errors import RankLost
from workers.engine.plan import NewRow, StepPlan, StepResult
from workers.engine.request import ChoiceParams
from workers.scripted import ScriptedExecutor, scripted_token


class EarlyExecutor:
    """Its ``launch`` returns at once, as on a GPU; the test says when a step is done. Not waitable."""

    def __init__(self) -> None:
        self.launched: deque[int] = deque()
        self.has_launched = threading.Semaphore(0)
        self.closed = threading.Event()
        self._done = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
        self._num_done = 0

    def finish_step(self) -> None:
        self._num_done += 1
        os.eventfd_write(self._done, 1)

    def launch(self, plan: StepPlan) -> None:
        self.launched.append(plan.step_id)
        self.has_launched.release()

    def collect(self) -> StepResult:
        os.eventfd_read(self._done)
        self._num_done -= 1
        return StepResult(self.launched.popleft(), [])

    def ready(self) -> bool:
        return self._num_done > 0

    def close(self) -> None:
        self.closed.set()
        os.close(self._done)


class WaitableExecutor(EarlyExecutor):
    def fileno(self) -> int:
        return self._done


def test_plans_go_to_all_ranks_and_results_of_rank_0_come_back(
    endpoint: str, threads: ThreadPoolExecutor, make_plan
) -> None:
    executor = ChannelExecutor(endpoint, 2)
    loops = [threads.submit(serve_steps, ScriptedExecutor(), endpoint, rank) for rank in range(2)]
    executor.wait_for_ranks(10.0)
    row = NewRow(0, list(range(20_000)), 20_000, ChoiceParams(max_tokens=4, seed=5, logit_bias={3: -1.0}))

    executor.launch(StepPlan(0, [row], [0], [0], [20_000], [True], [list(range(1250))]))
    executor.launch(StepPlan(1, [], [0], [20_000], [1], [True], [[]]))
    results = [executor.collect(10.0), executor.collect(10.0)]
    executor.close()

    assert [result.step_id for result in results] == [0, 1]
    assert results[0].token_ids == [scripted_token(5, 0, 20_000, 32_000)]
    assert [loop.result(10.0) for loop in loops] == [None, None]


@pytest.mark.parametrize("kind", [EarlyExecutor, WaitableExecutor])
def test_a_rank_whose_launch_returns_early_gets_the_next_plan_while_one_runs(
    endpoint: str, threads: ThreadPoolExecutor, make_plan, kind: type[EarlyExecutor]
) -> None:
    executor, rank = ChannelExecutor(endpoint, 1), kind()
    loop = threads.submit(serve_steps, rank, endpoint, 0)
    executor.wait_for_ranks(10.0)

    executor.launch(make_plan(0))
    executor.launch(make_plan(1))

    assert rank.has_launched.acquire(timeout=10)
    assert rank.has_launched.acquire(timeout=10)  # though no step is done
    assert not executor.ready()
    rank.finish_step()
    assert executor.collect(10.0).step_id == 0
    rank.finish_step()
    assert executor.collect(10.0).step_id == 1
    executor.close()
    loop.result(10.0)
    assert rank.closed.is_set()


@pytest.mark.parametrize("kind", [EarlyExecutor, WaitableExecutor])
def test_ranks_without_work_use_no_processor(
    endpoint: str, threads: ThreadPoolExecutor, kind: type[EarlyExecutor]
) -> None:
    executor = ChannelExecutor(endpoint, 2)
    loops = [threads.submit(serve_steps, kind(), endpoint, rank) for rank in range(2)]
    executor.wait_for_ranks(10.0)
    used_s = time.process_time()

    with pytest.raises(RankLost, match="within"):
        executor.collect(0.5)  # brain and ranks wait for each other meanwhile

    assert time.process_time() - used_s < 0.05  # who spins would use ten times that
    executor.close()
    assert [loop.result(10.0) for loop in loops] == [None, None]


def test_collect_gives_up_on_a_rank_that_does_not_answer(
    endpoint: str, threads: ThreadPoolExecutor, make_plan
) -> None:
    executor, rank = ChannelExecutor(endpoint, 1), EarlyExecutor()
    loop = threads.submit(serve_steps, rank, endpoint, 0)
    executor.wait_for_ranks(10.0)
    executor.launch(make_plan(0))

    with pytest.raises(RankLost, match=r"no result within 0\.05 s"):
        executor.collect(0.05)

    executor.close()
    loop.result(10.0)


def test_a_rank_that_fails_in_a_step_is_lost_to_the_brain(
    endpoint: str, threads: ThreadPoolExecutor, make_plan
) -> None:
    executor = ChannelExecutor(endpoint, 1)
    loop = threads.submit(serve_steps, ScriptedExecutor(), endpoint, 0)
    executor.wait_for_ranks(10.0)

    executor.launch(make_plan(0))  # names a row that was never new

    with pytest.raises(RankLost):
        executor.collect(10.0)
    assert isinstance(loop.exception(10.0), KeyError)
    executor.close()


def test_serving_without_a_brain_raises(endpoint: str) -> None:
    with pytest.raises(BrainLost):
        serve_steps(ScriptedExecutor(), endpoint, 0, connect_timeout_s=0.05)
