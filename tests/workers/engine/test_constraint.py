"""Grammars and thinking budgets: masks go out with plans, late where they depend on a token still being sampled."""

from __future__ import annotations

import pytest

from workers.engine.errors import InvalidRequest
from workers.engine.request import FinishReason


def test_the_first_mask_goes_with_the_prompt(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(4, grammar="7:9")

    plan = bench.plan()

    (mask,) = plan.masks
    assert mask.place == 0
    assert [i for i in range(30) if mask.allowed[i // 8] >> i % 8 & 1] == [1, 8, 15, 22, 29]
    assert plan.deferred == []


def test_a_step_ahead_computes_the_row_and_its_mask_comes_with_the_next_plan(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(4, max_tokens=9)
    bench.add(4, max_tokens=9, grammar="7:9")

    bench.plan()
    ahead = bench.plan()

    assert (len(ahead.rows), ahead.masks, ahead.deferred) == (2, [], [1])
    bench.apply()
    following = bench.plan()
    assert [mask.place for mask in following.late_masks.masks] == [1]
    assert following.deferred == [1]
    assert len(following.rows) == 2


def test_without_run_ahead_nothing_is_deferred(make_bench) -> None:
    bench = make_bench(run_ahead=0)
    bench.add(4, max_tokens=9, grammar="7:9")

    while (plan := bench.plan()) is not None:
        assert (len(plan.masks), plan.deferred, plan.late_masks) == (1, [], None)
        bench.apply()

    bench.assert_all_as_expected()


def test_the_last_masks_come_in_a_plan_of_their_own(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(4, max_tokens=2, grammar="7:9")
    bench.plan()
    bench.plan()

    bench.apply()
    last = bench.plan()

    assert (last.rows, len(last.late_masks.masks)) == ([], 1)
    bench.run()
    bench.assert_all_as_expected()


def test_a_row_that_was_aborted_is_sampled_freely(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    request_id = bench.add(4, max_tokens=9, grammar="7:9")
    bench.plan()
    bench.plan()
    bench.engine.abort(request_id)

    bench.apply()

    assert bench.plan().late_masks.masks == []
    bench.run()


def test_a_complete_grammar_ends_the_request_without_a_stop_token(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    request_id = bench.add(4, max_tokens=9, grammar="7:3")

    bench.run()

    assert len(bench.token_ids[request_id]) == 3
    assert bench.finish_reasons[request_id] is FinishReason.STOP
    assert bench.outputs[-1].stop_token_id is None


def test_a_grammar_complete_with_the_last_token_allowed_ends_in_stop(make_bench) -> None:
    bench = make_bench()
    request_id = bench.add(4, max_tokens=3, grammar="7:3")

    bench.run()

    assert bench.finish_reasons[request_id] is FinishReason.STOP


def test_output_from_elsewhere_is_replayed(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    whole, _ = bench.expected(bench.add(4, max_tokens=9, grammar="7:9", request_id="whole", seed=5))
    prompt = bench.requests["whole"].prompt_token_ids

    resumed = bench.add(prompt, max_tokens=9, grammar="7:9", seed=5, output_token_ids=whole[:4])
    done = bench.add(prompt, max_tokens=12, grammar="7:9", seed=5, output_token_ids=whole)
    bench.run()

    assert bench.token_ids[resumed] == whole[4:]
    assert bench.token_ids[done] == []
    assert bench.finish_reasons[done] is FinishReason.STOP


def test_output_from_elsewhere_that_does_not_match_is_refused(make_bench) -> None:
    bench = make_bench()

    with pytest.raises(InvalidRequest, match="2 is not allowed"):
        bench.add(4, grammar="7:9", output_token_ids=[2])

    assert not bench.engine.has_work


def test_a_grammar_that_fails_ends_its_request_alone(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    failing = bench.add(4, max_tokens=9, grammar="7:9:2")
    other = bench.add(4, max_tokens=9, grammar="3:9")

    bench.run()

    assert len(bench.token_ids[failing]) == 2
    assert bench.finish_reasons[failing] is FinishReason.ERROR
    assert [output.error for output in bench.outputs if output.error] == ["the grammar is too complex"]
    assert (bench.token_ids[other], bench.finish_reasons[other]) == bench.expected(other)


def test_thinking_is_free_until_its_budget_is_spent(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    request_id = bench.add(4, max_tokens=9, thinking_end=(998, 999), thinking_budget=3)

    plans = []
    while bench.engine.has_work:
        while (plan := bench.plan()) is not None:
            plans.append(plan)
        bench.apply()

    assert bench.token_ids[request_id][3:5] == [998, 999]
    # Only where thinking is over its budget, as far as is known, must sampling wait for the token before.
    assert [plan.deferred for plan in plans if plan.rows] == [[], [], [], [0], [0], [0], [], [], []]


def test_a_grammar_begins_when_thinking_has_ended(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    request_id = bench.add(
        4, max_tokens=12, grammar="7:4", thinking_end=(999,), thinking_budget=2, request_id="thinks"
    )

    bench.run()

    bench.assert_all_as_expected()
    answer = bench.token_ids[request_id][3:]
    assert len(answer) == 4
    assert answer[0] % 7 == 1
