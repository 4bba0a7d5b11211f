"""The demo model's greedy tokens equal those of transformers, however a request is batched, cut or cached."""

from __future__ import annotations

import pytest

from workers.checkpoint.source import ModelFiles


def prompts_and_outputs(goldens: list[dict]) -> tuple[list[list[int]], list[list[int]]]:
    return [case["prompt_token_ids"] for case in goldens], [case["output_token_ids"] for case in goldens]


def test_each_request_alone(driver, goldens) -> None:
    for case in goldens[:4]:
        outputs, _ = driver.generate([case["prompt_token_ids"]], 64)

        assert outputs == [case["output_token_ids"]], case["name"]


def test_thirty_two_at_once(driver, goldens) -> None:
    prompts, wanted = prompts_and_outputs(goldens)
    order = [index % len(prompts) for index in range(32)]

    outputs, _ = driver.generate([prompts[i] for i in order], 64)

    assert outputs == [wanted[i] for i in order]


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_prefill_in_chunks(driver, goldens, chunk: int) -> None:
    prompts, wanted = prompts_and_outputs(goldens)

    outputs, _ = driver.generate(prompts, 16, chunk=chunk)

    assert outputs == [tokens[:16] for tokens in wanted]


def test_a_prefix_computed_for_another_request(driver, goldens) -> None:
    case = next(case for case in goldens if len(case["prompt_token_ids"]) > 100)
    prompt = case["prompt_token_ids"]
    shared = driver.compute_blocks(prompt[:96])

    outputs, _ = driver.generate([prompt, prompt], 64, shared=shared)

    assert outputs == [case["output_token_ids"]] * 2


def test_blocks_that_the_same_step_fills(driver, goldens, plan_driver) -> None:
    case = next(case for case in goldens if len(case["prompt_token_ids"]) > 100)
    prompt = case["prompt_token_ids"]
    blocks = list(range(len(prompt) // 16 + 1))
    rows = [plan_driver.NewRow(row, prompt, len(prompt), plan_driver.GREEDY) for row in (0, 1)]
    first, second = blocks, [*blocks[:6], 100, 101, 102]

    result = driver.collect_plan(
        plan_driver.StepPlan(
            0, rows, [0, 1], [0, 96], [len(prompt), len(prompt) - 96], [True] * 2, [first, second]
        )
    )

    assert result.token_ids == case["output_token_ids"][:1] * 2


def test_steps_launched_ahead(driver, goldens) -> None:
    prompts, wanted = prompts_and_outputs(goldens[:3])

    outputs, _ = driver.generate(prompts, 24, is_ahead=True)

    assert outputs == [tokens[:24] for tokens in wanted]


def test_decodes_beside_a_prefill(driver, goldens, plan_driver) -> None:
    short, long = goldens[0], next(case for case in goldens if len(case["prompt_token_ids"]) > 100)
    known, prompt = short["prompt_token_ids"] + short["output_token_ids"][:5], long["prompt_token_ids"]
    rows = [plan_driver.NewRow(0, known, len(known) - 5, plan_driver.GREEDY)]
    plan = plan_driver.StepPlan
    driver.collect_plan(plan(0, rows, [0], [0], [len(known) - 1], [False], [[0, 1]]))
    rows = [plan_driver.NewRow(1, prompt, len(prompt), plan_driver.GREEDY)]

    starts, counts = [len(known) - 1, 0], [1, len(prompt)]
    result = driver.collect_plan(
        plan(1, rows, [0, 1], starts, counts, [True, True], [[], list(range(10, 20))])
    )

    assert result.token_ids == [short["output_token_ids"][5], long["output_token_ids"][0]]


@pytest.mark.slow
def test_without_packed_weights(make_rank, demo_model: ModelFiles, goldens, plan_driver) -> None:
    rank = make_rank(num_blocks=200, files=demo_model, max_model_len=256, pack_weights=False)
    prompts, wanted = prompts_and_outputs(goldens)

    outputs, _ = plan_driver.PlanDriver(rank, 200).generate(prompts, 64)

    assert outputs == wanted
