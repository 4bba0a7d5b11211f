from __future__ import annotations

import pytest

from workers.engine.cost_model import CostModel


@pytest.mark.parametrize("actual_s", [0.001, 0.004, 0.05])
def test_repeated_steps_bring_the_prediction_to_what_they_take(actual_s: float) -> None:
    cost = CostModel()

    for _ in range(200):
        cost = cost.observe(actual_s, num_decodes=16, num_prefill_tokens=0)

    assert cost.step_s(16) == pytest.approx(actual_s, rel=0.05)


def test_prefill_steps_correct_the_price_of_a_prompt_token() -> None:
    cost = CostModel()

    for _ in range(300):
        cost = cost.observe(0.5, num_decodes=0, num_prefill_tokens=1000)

    assert cost.step_s(0, 1000) == pytest.approx(0.5, rel=0.05)


def test_one_slow_step_moves_the_model_a_little_only() -> None:
    cost = CostModel()

    assert cost.observe(100.0, 16, 0).step_s(16) < 2 * cost.step_s(16)


def test_a_step_without_time_or_work_says_nothing() -> None:
    cost = CostModel()

    assert cost.observe(0.0, 16, 0) is cost
    assert cost.observe(1.0, 0, 0) is cost


def test_mixed_steps_teach_what_each_part_costs() -> None:
    truth = CostModel(base_s=0.002, per_sequence_s=0.0004, per_token_s=0.001, per_context_token_s=0.0)
    shapes = [(1, 0), (8, 0), (32, 0), (4, 200), (0, 500), (16, 60)]
    cost = CostModel()

    for _ in range(300):
        for shape in shapes:
            cost = cost.observe(truth.step_s(*shape), *shape)

    for shape in [*shapes, (20, 0), (2, 1000)]:
        assert cost.step_s(*shape) == pytest.approx(truth.step_s(*shape), rel=0.1)
