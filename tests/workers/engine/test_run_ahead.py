from __future__ import annotations


def test_the_next_step_is_planned_before_the_result_of_this_one(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(4, max_tokens=8)

    first, second, third = bench.plan(), bench.plan(), bench.plan()

    assert (first.starts, first.num_tokens) == ([0], [4])
    assert (second.starts, second.num_tokens, second.samples) == ([4], [1], [True])
    assert third is None  # one step ahead and no further


def test_without_run_ahead_each_result_is_awaited(make_bench) -> None:
    bench = make_bench(run_ahead=0)
    bench.add(4)

    bench.plan()

    assert bench.plan() is None


def test_the_token_past_a_stop_is_dropped_and_its_blocks_come_free_a_step_later(make_bench) -> None:
    bench = make_bench(run_ahead=1, block_size=1)
    stop = bench.expected(bench.add(2, max_tokens=9))[0][2]
    bench.run()
    stopped = bench.add(bench.requests["r0"].prompt_token_ids, max_tokens=9, seed=0, stop_token_ids=(stop,))

    while stopped not in bench.finish_reasons:
        bench.step()
    num_free_then = bench.engine.load().num_free_blocks
    assert bench.engine.num_launched == 1
    outputs = bench.apply()

    assert bench.token_ids[stopped][-1] == stop
    assert bench.finish_reasons[stopped] == "stop"
    assert outputs == []
    assert num_free_then < bench.engine.load().num_free_blocks == bench.engine.load().num_blocks


def test_no_step_is_planned_past_max_tokens(make_bench) -> None:
    bench = make_bench(run_ahead=1)
    bench.add(4, max_tokens=2)

    assert bench.plan() is not None
    assert bench.plan() is not None
    bench.apply()

    assert bench.plan() is None
    bench.apply()
    assert not bench.engine.has_work


def test_blocks_of_an_aborted_request_are_held_until_launched_steps_are_done(make_bench) -> None:
    bench = make_bench(run_ahead=1, num_blocks=32, block_size=4)
    request_id = bench.add(8, max_tokens=8)
    bench.plan()
    bench.plan()

    bench.engine.abort(request_id)

    assert bench.engine.load().num_free_blocks == 29
    bench.apply()
    assert bench.engine.load().num_free_blocks == 29
    bench.apply()
    assert bench.engine.load().num_free_blocks == 32
    assert not bench.engine.has_work
