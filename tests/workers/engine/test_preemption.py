from __future__ import annotations


def test_the_last_in_turn_is_preempted_when_blocks_run_dry(make_bench) -> None:
    bench = make_bench(num_blocks=5, block_size=2, enable_prefix_caching=False)
    old = bench.add(4, max_tokens=5)
    young = bench.add(2, max_tokens=5)
    bench.step()  # two blocks and one, two left
    bench.step()  # each takes a block for the token it decodes
    bench.step()

    plan = bench.plan()  # each wants one more, and there is none

    assert len(plan.rows) == 1
    assert bench.engine.load().num_waiting == 1
    assert bench.engine.load().num_preemptions == 1
    bench.run()
    assert list(bench.finish_reasons) == [old, young]
    bench.assert_all_as_expected()


def test_a_preempted_request_keeps_its_tokens_and_resumes_with_all_of_them(make_bench) -> None:
    bench = make_bench(num_blocks=5, block_size=2, enable_prefix_caching=False)
    bench.add(4, max_tokens=5)
    young = bench.add(2, max_tokens=5)
    while not bench.engine.load().num_preemptions:
        bench.step()
    so_far = list(bench.token_ids[young])

    while not (plan := bench.plan()).new_rows:
        bench.apply()

    assert so_far
    assert plan.new_rows[0].token_ids == [*bench.requests[young].prompt_token_ids, *so_far]
    assert plan.new_rows[0].num_prompt_tokens == 2
    bench.apply()
    assert bench.outputs[-1].num_preemptions == 1


def test_the_token_in_flight_of_a_preempted_request_is_not_lost(make_bench) -> None:
    bench = make_bench(num_blocks=5, block_size=2, run_ahead=1, enable_prefix_caching=False)
    bench.add(4, max_tokens=5)
    young = bench.add(2, max_tokens=5)
    while (plan := bench.plan()) is not None or not bench.engine.load().num_preemptions:
        if plan is None:
            bench.apply()
    num_before = len(bench.token_ids[young])

    outputs = bench.apply()  # of a step launched before the preemption

    assert young in {output.request_id for output in outputs}
    assert len(bench.token_ids[young]) == num_before + 1
    bench.run()
    bench.assert_all_as_expected()


def test_a_preempted_request_finds_its_own_blocks_again(make_bench) -> None:
    bench = make_bench(num_blocks=9, block_size=2)
    bench.add(4, max_tokens=12)
    young = bench.add(8, max_tokens=4)
    while not bench.engine.load().num_preemptions:
        bench.step()

    while not (plan := bench.plan()).new_rows:
        bench.apply()

    assert bench.engine.load().num_preemptions == 1
    assert len(plan.new_rows[0].token_ids) > 8
    assert plan.starts[0] >= 2
    bench.run()
    assert young in bench.finish_reasons
    bench.assert_all_as_expected()


def test_a_request_preempted_often_is_spared_while_another_can_be(make_bench) -> None:
    bench = make_bench(num_blocks=9, block_size=1, max_preemptions=1, enable_prefix_caching=False)
    for _ in range(3):
        bench.add(1, max_tokens=8)

    bench.run()

    bench.assert_all_as_expected()
    last_outputs = {output.request_id: output.num_preemptions for output in bench.outputs}
    assert max(last_outputs.values()) <= 2
    assert last_outputs["r0"] == 0  # the first in turn always gets through


def test_a_request_is_admitted_only_if_those_running_keep_room_to_grow(make_bench) -> None:
    bench = make_bench(num_blocks=4, block_size=4, enable_prefix_caching=False)
    bench.add(4, max_tokens=8)
    bench.step()
    bench.add(12, max_tokens=2)  # three blocks: all that are left

    bench.step()

    assert bench.engine.load().num_waiting == 1
    bench.run()
    bench.assert_all_as_expected()
    assert bench.engine.load().num_preemptions == 0


def test_a_request_about_to_end_is_waited_for_instead_of_preempted(make_bench) -> None:
    bench = make_bench(num_blocks=5, block_size=2, run_ahead=1, enable_prefix_caching=False)
    bench.add(5, max_tokens=4)
    bench.add(2, max_tokens=2)
    bench.plan()
    bench.plan()  # the second request's last token is in flight now

    bench.run()

    bench.assert_all_as_expected()
    assert bench.engine.load().num_preemptions == 0
