from __future__ import annotations

from workers.engine.policy import FairShare
from workers.engine.request import ChoiceParams, EngineRequest


def first_steps(bench) -> list[str]:
    """Requests in the order in which they began."""
    begun = [output.request_id for output in bench.outputs if output.num_cached_tokens is not None]
    assert sorted(begun) == sorted(bench.requests)
    return begun


def test_a_more_important_request_takes_the_row_of_a_running_one(make_bench) -> None:
    bench = make_bench(policy="priority", max_num_seqs=2)
    low = [bench.add(4, max_tokens=12, priority=5) for _ in range(2)]
    bench.step()

    high = bench.add(4, max_tokens=2, priority=1)
    bench.run()

    bench.assert_all_as_expected()
    assert list(bench.finish_reasons) == [high, *low]
    assert bench.engine.load().num_preemptions == 1


def test_a_more_important_request_takes_the_blocks_of_running_ones(make_bench) -> None:
    bench = make_bench(policy="priority", num_blocks=8, block_size=2, run_ahead=1)
    bench.add(5, max_tokens=5, priority=5)
    bench.add(5, max_tokens=5, priority=7)
    bench.step()

    high = bench.add(10, max_tokens=2, priority=1)
    bench.run()

    bench.assert_all_as_expected()
    assert next(iter(bench.finish_reasons)) == high


def test_equal_requests_are_not_preempted_for_each_other(make_bench) -> None:
    bench = make_bench(policy="priority", max_num_seqs=1)
    for _ in range(3):
        bench.add(4, max_tokens=6, priority=2)

    bench.run()

    assert list(bench.finish_reasons) == ["r0", "r1", "r2"]
    assert bench.engine.load().num_preemptions == 0


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few(make_bench) -> None:
    bench = make_bench(policy="fair", max_num_seqs=1)
    greedy = [bench.add(4, max_tokens=4, tenant="greedy") for _ in range(6)]
    modest = [bench.add(4, max_tokens=4, tenant="modest") for _ in range(2)]

    bench.run()

    order = first_steps(bench)
    assert order[:4] in (
        [greedy[0], modest[0], greedy[1], modest[1]],
        [greedy[0], greedy[1], modest[0], modest[1]],
    )
    bench.assert_all_as_expected()


def test_tenants_share_by_tokens_not_by_requests(make_bench) -> None:
    bench = make_bench(policy="fair", max_num_seqs=1)
    long = [bench.add(8, max_tokens=20, tenant="long") for _ in range(3)]
    short = [bench.add(2, max_tokens=2, tenant="short") for _ in range(8)]

    bench.run()

    order = first_steps(bench)
    assert order[0] == long[0]
    assert order[1:9] == short  # together they are less than the second long one


def test_a_tenant_that_was_away_has_saved_nothing_up(make_bench) -> None:
    bench = make_bench(policy="fair", max_num_seqs=1)
    for _ in range(4):
        bench.add(8, max_tokens=20, tenant="busy")
    bench.run()
    first = bench.add(4, max_tokens=4, tenant="busy")

    for _ in range(3):
        bench.add(4, max_tokens=4, tenant="new")
    second = bench.add(4, max_tokens=4, tenant="busy")
    bench.run()

    order = first_steps(bench)
    assert order[-5:] == [first, "r5", "r6", second, "r7"]


def test_what_an_early_end_leaves_unused_is_given_back(make_bench) -> None:
    bench = make_bench(policy="fair", max_num_seqs=1)
    stop = bench.expected(bench.add(4, max_tokens=40, tenant="a", seed=1))[0][0]
    bench.engine.abort("r0")
    prompt = bench.requests["r0"].prompt_token_ids
    del bench.requests["r0"]
    bench.add(prompt, max_tokens=40, tenant="a", seed=1, stop_token_ids=(stop,))
    bench.run()
    blocker = bench.add(2, max_tokens=8, tenant="c")
    bench.step()

    other = bench.add(4, max_tokens=4, tenant="b")
    own = bench.add(4, max_tokens=4, tenant="a")
    bench.run()

    order = list(bench.finish_reasons)
    assert order.index(blocker) < order.index(own)
    assert abs(order.index(own) - order.index(other)) == 1


def test_a_long_prompt_never_keeps_a_running_request_out_of_a_step(make_bench) -> None:
    bench = make_bench(
        max_model_len=33000, num_blocks=2200, block_size=16, max_num_batched_tokens=512, run_ahead=1
    )
    short = [bench.add(4, max_tokens=100) for _ in range(3)]
    bench.step()
    bench.add(32000, max_tokens=1)

    plans = []
    while not set(short) <= bench.finish_reasons.keys():
        while (plan := bench.engine.plan(0.0)) is not None:
            bench.rank.launch(plan)
            plans.append(plan)
        bench.apply()

    during = [plan for plan in plans if plan.num_batched_tokens > 100]
    assert len(during) >= 60
    assert all(plan.num_tokens[:3] == [1, 1, 1] for plan in during[:60])
    assert max(plan.num_batched_tokens for plan in plans) <= 512


def test_tenants_that_never_come_back_are_forgotten() -> None:
    policy = FairShare()
    policy.turn(EngineRequest("stays", [1], ChoiceParams(max_tokens=1), tenant="stays"), 0)
    most = 0
    for number in range(1, 6000):
        request = EngineRequest(str(number), [1], ChoiceParams(max_tokens=3), tenant=f"tenant {number}")
        policy.turn(request, number)
        policy.ended(request, 1)
        most = max(most, policy.num_tenants)

    assert most <= 2001
