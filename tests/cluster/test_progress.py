"""Health means progress."""

from __future__ import annotations

import pytest

from cluster.progress import ProgressMonitor, stall_limit_s
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel


def test_an_idle_engine_that_answers_is_healthy_for_ever() -> None:
    monitor = ProgressMonitor(stall_timeout_s=10, now_s=0)

    for second in range(100):
        monitor.on_answer(num_steps=5, has_work=False, now_s=second)

    assert monitor.complaint(now_s=100) is None


def test_an_engine_that_answers_but_makes_no_step_is_stuck() -> None:
    monitor = ProgressMonitor(stall_timeout_s=10, now_s=0)

    for second in range(12):
        monitor.on_answer(num_steps=5 if second else 4, has_work=True, now_s=second)

    assert "no step has ended" in (monitor.complaint(now_s=12) or "")


def test_an_engine_that_does_not_answer_is_stuck() -> None:
    monitor = ProgressMonitor(stall_timeout_s=10, now_s=0)
    monitor.on_answer(num_steps=1, has_work=False, now_s=1)

    assert monitor.complaint(now_s=11) is None
    assert "not answered for 12 s" in (monitor.complaint(now_s=12.5) or "")


def test_time_without_work_does_not_count_against_the_first_step() -> None:
    monitor = ProgressMonitor(stall_timeout_s=10, now_s=0)
    monitor.on_answer(num_steps=0, has_work=False, now_s=99)

    monitor.on_answer(num_steps=0, has_work=True, now_s=100)

    assert monitor.complaint(now_s=105) is None


@pytest.mark.parametrize(
    ("per_token_s", "limit_s"),
    [(1 / 45000, 10.0), (1 / 1000, 22.6), (1 / 100, 60.0)],  # an H200, a CPU, a slow CPU
)
def test_a_step_is_waited_for_as_long_as_the_largest_may_take(per_token_s: float, limit_s: float) -> None:
    limits = EngineConfig(max_model_len=2048, num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=1024)
    cost = CostModel(base_s=0.008, per_sequence_s=0.0015, per_token_s=per_token_s)

    assert stall_limit_s(cost, limits, at_most_s=60.0) == pytest.approx(limit_s, abs=0.05)
