from __future__ import annotations

import random

import pytest

from workers.engine.cost_model import CostFit, CostModel, StepWork


@pytest.mark.parametrize("actual_s", [0.001, 0.004, 0.05])
def test_repeated_steps_bring_the_prediction_to_what_they_take(actual_s: float) -> None:
    fit = CostFit(CostModel())

    for _ in range(200):
        fit.observe_step(actual_s, StepWork(num_decodes=16))

    assert fit.cost.step_s(16) == pytest.approx(actual_s, rel=0.05)


def test_prefill_steps_correct_the_price_of_a_prompt_token() -> None:
    fit = CostFit(CostModel())

    for _ in range(300):
        fit.observe_step(0.5, StepWork(num_prefill_tokens=1000))

    assert fit.cost.step_s(0, 1000) == pytest.approx(0.5, rel=0.05)


def test_one_slow_step_moves_the_model_a_little_only() -> None:
    fit = CostFit(CostModel())

    fit.observe_step(100.0, StepWork(num_decodes=16))

    assert fit.cost.step_s(16) < 2 * CostModel().step_s(16)


def test_a_step_without_time_or_work_says_nothing() -> None:
    fit = CostFit(CostModel())

    fit.observe_step(0.0, StepWork(num_decodes=16))
    fit.observe_step(1.0, StepWork())
    fit.observe_copies(0.0, 5)
    fit.observe_copies(1.0, 0)

    assert fit.cost == CostModel()


def test_mixed_steps_teach_what_each_part_costs() -> None:
    truth = CostModel(base_s=0.002, per_sequence_s=0.0004, per_token_s=0.001, per_context_token_s=0.0)
    shapes = [(1, 0), (8, 0), (32, 0), (4, 200), (0, 500), (16, 60)]
    fit = CostFit(CostModel())

    for _ in range(300):
        for shape in shapes:
            fit.observe_step(truth.step_s(*shape), StepWork(*shape))

    for shape in [*shapes, (20, 0), (2, 1000)]:
        assert fit.cost.step_s(*shape) == pytest.approx(truth.step_s(*shape), rel=0.1)


def test_predictions_are_right_within_a_tenth_where_costs_do_not_simply_add_up() -> None:
    rng = random.Random(1)
    fit = CostFit(CostModel())

    for _ in range(300):
        num_decodes, num_prefill = rng.randint(30, 64), rng.choice([0, 0, 0, 96, 200, 672, 1344])
        work = StepWork(num_decodes, num_prefill, num_decodes * rng.randint(100, 700), num_prefill**2 // 2)
        # As on an H200: few tokens take as long as the weights take to read, many what their products take.
        products_s = max(3.9e-3, 22e-6 * (num_decodes + num_prefill))
        elapsed_s = products_s + 3.2e-8 * work.num_context_tokens + 9e-10 * work.num_attended
        fit.observe_step(elapsed_s * rng.gauss(1, 0.02), work)

    assert fit.step_error_p50 < 0.1


def test_what_the_last_steps_did_not_use_keeps_its_price() -> None:
    fit = CostFit(CostModel(per_token_s=1e-4))
    for _ in range(100):
        fit.observe_step(0.02 + 2e-4 * 500, StepWork(4, 500))
        fit.observe_step(0.02, StepWork(4))

    for _ in range(2000):
        fit.observe_step(0.02, StepWork(4))

    assert fit.cost.prefill_s(500) == pytest.approx(0.1, rel=0.1)


def test_copies_move_their_price_towards_what_they_take() -> None:
    fit = CostFit(CostModel())

    for _ in range(30):
        fit.observe_copies(0.1, 10)

    assert fit.cost.copy_s(10) == pytest.approx(0.1, rel=0.02)
