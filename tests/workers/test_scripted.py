from __future__ import annotations

from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.scripted import ScriptedExecutor, scripted_token


def make_plan(step_id: int = 0, *, start: int = 0, **params: object) -> StepPlan:
    row = NewRow(0, [1, 2, 3], 3, ChoiceParams(max_tokens=4, seed=6, **params))
    return StepPlan(step_id, [row], [0], [start], [3], [True], [[0]])


def test_a_token_depends_on_seed_choice_and_position_alone() -> None:
    one, other = ScriptedExecutor(100), ScriptedExecutor(100)
    one.launch(make_plan())
    other.launch(make_plan(7))

    assert one.collect().token_ids == other.collect().token_ids == [scripted_token(6, 0, 3, 100)]
    assert (
        len(
            {scripted_token(seed, choice, at, 10**6) for seed in (1, 2) for choice in (0, 1) for at in (3, 4)}
        )
        == 8
    )


def test_steps_follow_each_other_at_the_step_time() -> None:
    now_s = 10.0
    slept_s: list[float] = []
    executor = ScriptedExecutor(step_s=0.5, clock=lambda: now_s, sleep=slept_s.append)
    assert executor.ready_in_s() is None

    executor.launch(make_plan(0))
    executor.launch(make_plan(1))

    assert executor.ready_in_s() == 0.5
    assert not executor.ready()
    assert executor.collect().step_id == 0
    now_s = 10.75
    assert executor.ready_in_s() == 0.25
    assert executor.collect().step_id == 1
    assert slept_s == [0.5, 0.25]


def test_logprobs_have_the_shape_that_was_asked_for() -> None:
    executor = ScriptedExecutor(100)
    executor.launch(make_plan(num_logprobs=3))

    [logprobs] = executor.collect().logprobs

    assert len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == 3
    assert logprobs.top_logprobs == sorted(logprobs.top_logprobs, reverse=True)
