from __future__ import annotations


def test_a_prompt_beyond_the_budget_is_computed_in_chunks_and_sampled_from_once(make_bench) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add(20, max_tokens=1)

    plans = []
    while bench.engine.has_work:
        plans.append(bench.plan())
        bench.apply()

    assert [plan.starts for plan in plans] == [[0], [8], [16]]
    assert [plan.num_tokens for plan in plans] == [[8], [8], [4]]
    assert [plan.samples for plan in plans] == [[False], [False], [True]]


def test_decodes_come_first_and_a_prompt_gets_what_they_leave_of_the_budget(make_bench) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add(2, max_tokens=8)
    bench.step()
    bench.add(20)

    plan = bench.plan()

    assert plan.num_tokens == [1, 7]
    assert plan.samples == [True, False]


def test_a_fresh_request_of_one_token_counts_as_a_decode(make_bench) -> None:
    bench = make_bench()
    bench.add(6)
    bench.add(1)

    plan = bench.plan()

    assert plan.num_tokens == [1, 6]
    assert [new_row.row for new_row in plan.new_rows] == [0, 1]
    assert plan.rows == [1, 0]


def test_a_new_row_brings_all_tokens_and_later_plans_only_what_changed(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add([5, 6, 7], max_tokens=4)

    first = bench.plan()
    bench.apply()
    second = bench.plan()
    bench.apply()
    third = bench.plan()

    assert first.new_rows[0].token_ids == [5, 6, 7]
    assert first.new_rows[0].num_prompt_tokens == 3
    assert len(first.new_block_ids[0]) == 1
    assert second.new_rows == []
    assert second.new_block_ids == [[]]  # the fourth token still fits
    assert len(third.new_block_ids[0]) == 1


def test_no_more_requests_run_than_there_are_rows_and_a_row_is_free_at_once(make_bench) -> None:
    bench = make_bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(2, max_tokens=2)

    assert bench.plan().rows == [0, 1]
    bench.apply()
    assert bench.plan().rows == [0, 1]
    bench.apply()
    assert len(bench.plan().rows) == 1


def test_first_come_is_first_served(make_bench) -> None:
    bench = make_bench(max_num_seqs=1)
    first, second = bench.add(2, priority=5), bench.add(2, priority=0)

    bench.run()

    assert list(bench.finish_reasons) == [first, second]


def test_the_priority_policy_serves_the_lowest_number_first(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, policy="priority")
    low, high = bench.add(2, priority=5), bench.add(2, priority=0)

    bench.run()

    assert list(bench.finish_reasons) == [high, low]


def test_an_aborted_request_is_absent_from_the_next_plan_and_never_heard_of(make_bench) -> None:
    bench = make_bench(run_ahead=0)
    gone, stays = bench.add(4, max_tokens=8), bench.add(4, max_tokens=8)
    bench.step()

    assert bench.engine.abort(gone)
    plan = bench.plan()
    outputs = bench.apply()

    assert len(plan.rows) == 1
    assert [output.request_id for output in outputs] == [stays]
    assert not bench.engine.abort(gone)


def test_a_waiting_request_can_be_aborted(make_bench) -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add(4)
    waiting = bench.add(4)
    bench.step()

    bench.engine.abort(waiting)
    bench.run()

    assert waiting not in bench.finish_reasons
    assert bench.engine.load().num_queued_tokens == 0


def test_an_idle_engine_plans_nothing(make_bench) -> None:
    bench = make_bench()

    assert bench.plan() is None
    assert not bench.engine.has_work


def test_the_first_output_tells_how_long_the_request_waited(make_bench) -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add(2, max_tokens=1)
    bench.add(2, max_tokens=2)

    bench.step()
    bench.now_s = 2.5
    bench.run()

    assert [output.waited_s for output in bench.outputs] == [0.0, 2.5, None]
