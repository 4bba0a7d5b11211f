from __future__ import annotations

import pytest

from workers.engine.cost_model import attended
from workers.engine.plan import StepResult, TokenLogprobs


def test_load_counts_what_waits_and_what_runs(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8, block_size=4)
    bench.add(12)
    bench.add(10)

    bench.step()
    load = bench.engine.load()

    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.num_queued_tokens == 4 + 10
    assert load.num_context_tokens == 8
    assert (load.num_free_blocks, load.num_blocks) == (30, 32)
    assert load.num_steps == 1


def test_tokens_in_the_cache_are_not_queued_work(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, block_size=4)
    prompt = list(range(200, 209))
    bench.add(prompt, max_tokens=1)
    bench.run()
    bench.add(4)
    bench.step()

    bench.add(prompt)

    assert bench.engine.load().num_queued_tokens == 1


def test_queued_work_knows_what_each_token_will_read(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8, block_size=4)
    bench.add(12)
    bench.add(10)

    bench.step()  # eight of the first one's twelve tokens are computed

    assert bench.engine.load().num_queued_attended == attended(4, 8) + attended(10, 0)


def test_launched_steps_are_work_ahead_until_their_results_are_there(make_bench) -> None:
    bench = make_bench(max_num_batched_tokens=8, block_size=4, run_ahead=1)
    bench.add(12, max_tokens=1)
    bench.plan()
    bench.plan()  # both steps are under way: nothing is left to plan

    before = bench.engine.load()
    bench.apply()
    between = bench.engine.load()
    bench.apply()
    after = bench.engine.load()

    assert [load.num_queued_tokens for load in (before, between, after)] == [12, 4, 0]
    assert before.num_queued_attended == attended(8, 0) + attended(4, 8)


def test_a_request_whose_blocks_are_on_their_way_is_queued_work(make_bench) -> None:
    bench = make_bench(
        num_blocks=12, block_size=2, num_host_blocks=100, max_num_batched_tokens=12, copy_lag=1
    )
    prompt = list(range(200, 209))
    bench.add(prompt, max_tokens=1)
    bench.run()
    for number in range(6):  # until the first prompt's blocks are on the host alone
        bench.add([number, *range(9)], max_tokens=1)
        bench.run()
    bench.add(prompt, max_tokens=2)
    bench.plan()

    load = bench.engine.load()
    assert (load.num_running, load.num_waiting) == (0, 1)
    assert (load.num_queued_tokens, load.num_queued_attended) == (1, attended(1, 8))


def test_waste_is_the_share_of_slots_that_hold_no_token(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(5)  # two blocks, three slots empty
    bench.add(7)  # two blocks, one slot empty

    bench.step()

    assert bench.engine.load().kv_waste == pytest.approx(4 / 16)


def test_an_idle_engine_wastes_nothing(make_bench) -> None:
    assert make_bench().engine.load().kv_waste == 0.0


def test_each_result_corrects_the_cost_model(make_bench) -> None:
    bench = make_bench()
    bench.add(4)
    before = bench.engine.load().cost
    bench.plan()
    answer = bench.rank.collect()

    bench.engine.apply(StepResult(answer.step_id, answer.token_ids, elapsed_s=0.1), 7.0)

    after = bench.engine.load().cost
    assert before.step_s(0, 4) < after.step_s(0, 4) < 0.1
    assert bench.engine.last_progress_s == 7.0


def test_logprobs_travel_with_their_token(make_bench) -> None:
    bench = make_bench()
    bench.add(2, num_logprobs=1)
    bench.add(2)
    bench.plan()
    answer = bench.rank.collect()
    logprobs = TokenLogprobs(-0.5, [3], [-0.25])

    outputs = bench.engine.apply(StepResult(answer.step_id, answer.token_ids, [logprobs, None]), 0.0)

    assert [output.logprobs for output in outputs] == [[logprobs], None]
