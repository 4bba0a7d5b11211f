"""A request that waits and has not begun can be had back, and it can be asked what stands before it."""

from __future__ import annotations

import pytest

from workers.engine.cost_model import CostModel, attended
from workers.engine.policy import FairShare
from workers.engine.request import ChoiceParams, EngineRequest


def test_a_request_that_waits_is_given_back_and_nothing_more_is_heard_of_it(make_bench) -> None:
    bench = make_bench(max_num_seqs=1)
    first, second = bench.add(4), bench.add(6)
    bench.step()

    assert bench.engine.release(second)

    bench.run()
    bench.assert_as_expected(first)
    assert second not in bench.finish_reasons
    assert bench.engine.load().num_queued_tokens == 0


def test_a_request_that_has_begun_stays(make_bench) -> None:
    bench = make_bench(max_num_batched_tokens=4)
    request_id = bench.add(12)
    bench.plan()  # a third of its prompt is being computed

    assert not bench.engine.release(request_id)
    assert not bench.engine.release("never was")

    bench.run()
    bench.assert_all_as_expected()


def test_a_preempted_request_stays_though_it_waits(make_bench) -> None:
    bench = make_bench(num_blocks=6, block_size=2, max_model_len=10)
    old, young = bench.add(2, max_tokens=8), bench.add(2, max_tokens=8)
    while not bench.engine.load().num_preemptions:
        bench.step()

    assert not bench.engine.release(young)

    bench.run()
    bench.assert_as_expected(old)
    bench.assert_as_expected(young)


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["r1", "r2", "r3"]), ("priority", ["r3", "r1", "r2"])]
)
def test_the_queue_shows_what_stands_before_each_request(make_bench, policy, order) -> None:
    bench = make_bench(max_num_seqs=1, max_num_batched_tokens=8, policy=policy)
    bench.add(12)
    bench.step()  # eight of its tokens are computed
    for num_tokens, priority in ((10, 0), (6, 0), (5, -1)):
        bench.add(num_tokens, priority=priority)

    shown = bench.engine.queued()

    assert [one.request_id for one in shown] == order
    num_tokens, num_attended = 4, attended(4, 8)
    for num_before, one in enumerate(shown, start=1):
        assert (one.num_tokens_ahead, one.num_attended_ahead) == (num_tokens, num_attended)
        assert one.num_requests_ahead == num_before
        num_tokens += one.num_uncached_tokens
        num_attended += attended(one.num_uncached_tokens, 0)


def test_the_queue_shows_only_whom_it_is_asked_about(make_bench) -> None:
    bench = make_bench(max_num_seqs=8, max_num_batched_tokens=4, cost=CostModel(per_token_s=0.1))
    bench.add(4, max_tokens=8)
    bench.step()
    for number in range(6):
        bench.add(10, request_id=f"{number % 2}/{number}")

    shown = bench.engine.queued("1/", least_wait_s=3.0, most=1)

    assert [(one.request_id, one.num_tokens_ahead) for one in shown] == [("1/3", 30)]


def test_who_lacks_a_seat_is_shown_however_little_is_to_be_computed(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, cost=CostModel(per_token_s=1e-6))
    bench.add(4, max_tokens=8)
    bench.step()
    waiting = bench.add(4)

    assert [one.request_id for one in bench.engine.queued(least_wait_s=3.0)] == [waiting]


def test_siblings_count_the_blocks_that_one_given_back_would_have_computed(make_bench) -> None:
    bench = make_bench(max_num_seqs=1, block_size=4)
    bench.add(4, max_tokens=8)
    bench.step()
    prompt = list(range(200, 217))
    first, second, third = bench.add(prompt), bench.add(prompt), bench.add(prompt)
    assert [one.num_uncached_tokens for one in bench.engine.queued()] == [17, 1, 1]

    assert bench.engine.release(first)

    assert [(one.request_id, one.num_uncached_tokens) for one in bench.engine.queued()] == [
        (second, 17),
        (third, 1),
    ]
    bench.engine.check()


def test_a_tenant_pays_nothing_for_what_it_is_given_back() -> None:
    policy = FairShare()
    requests = [
        EngineRequest(name, [1] * 100, ChoiceParams(max_tokens=50), tenant="a") for name in ("one", "two")
    ]
    before = policy.turn(requests[0], 0)
    policy.turn(EngineRequest("other", [1], ChoiceParams(max_tokens=1), tenant="b"), 1)

    policy.released(requests[0])

    assert policy.turn(requests[1], 2)[0] == before[0]
