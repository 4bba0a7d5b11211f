"""Limits of keys: what a minute lets in, how several ingresses share it, and that usage adds up."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tenancy.gate import Admission, Budget, Gate, Share
from router.tenancy.keys import Tenant
from router.tenancy.window import Window
from workers.engine.errors import Forbidden, RateLimited

MODEL = ("llama", "alias")


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> Gate:
    return Gate(clock)


def num_admitted(gate: Gate, tenant: Tenant, attempts: int, num_tokens: int = 1) -> int:
    admitted = 0
    for _ in range(attempts):
        try:
            gate.admit(tenant, MODEL, num_tokens).end(0)
        except RateLimited:
            continue
        admitted += 1
    return admitted


# -- one process --------------------------------------------------------------------------------------------


def test_a_key_is_told_what_is_left_of_its_own_limits(gate: Gate, clock: Clock) -> None:
    tenant = Tenant("a", requests_per_minute=10, tokens_per_minute=100)
    gate.read_share = lambda: Share(0, 2)

    gate.admit(tenant, MODEL, 7).end(3)

    assert gate.budgets(tenant) == {"requests": Budget(10, 4, 61), "tokens": Budget(100, 40, 61)}
    clock.now_s += 61
    assert gate.budgets(tenant) == {"requests": Budget(10, 5, 0), "tokens": Budget(100, 50, 0)}
    assert gate.budgets(Tenant("free")) == {}
    gate.read_share = lambda: Share(1, 5)  # others have come
    assert gate.budgets(tenant) == {"requests": Budget(10, 2, 0), "tokens": Budget(100, 20, 0)}


def test_a_minute_lets_in_its_requests_and_the_next_as_many(gate: Gate, clock: Clock) -> None:
    tenant = Tenant("a", requests_per_minute=10)

    assert num_admitted(gate, tenant, 30) == 10
    clock.now_s += 59
    assert num_admitted(gate, tenant, 30) == 0
    clock.now_s += 2
    assert num_admitted(gate, tenant, 30) == 10


def test_a_refusal_says_when_to_come_again_and_then_it_works(gate: Gate, clock: Clock) -> None:
    tenant = Tenant("a", requests_per_minute=1)
    gate.admit(tenant, MODEL, 1)
    clock.now_s += 20

    with pytest.raises(RateLimited, match="1 requests a minute is the limit of key 'a'") as caught:
        gate.admit(tenant, MODEL, 1)

    clock.now_s += caught.value.retry_after_s
    gate.admit(tenant, MODEL, 1)


def test_output_tokens_count_against_the_minute(gate: Gate) -> None:
    tenant = Tenant("a", tokens_per_minute=100)
    gate.admit(tenant, MODEL, 10).end(90)

    with pytest.raises(RateLimited, match="100 tokens a minute"):
        gate.admit(tenant, MODEL, 1)


def test_a_prompt_longer_than_the_limit_passes_alone(gate: Gate, clock: Clock) -> None:
    tenant = Tenant("a", tokens_per_minute=100)

    gate.admit(tenant, MODEL, 500)

    with pytest.raises(RateLimited):
        gate.admit(tenant, MODEL, 1)
    clock.now_s += 62
    gate.admit(tenant, MODEL, 500)


def test_no_more_run_at_once_than_the_key_allows(gate: Gate) -> None:
    tenant = Tenant("a", max_concurrency=2)
    first, _second = gate.admit(tenant, MODEL, 1), gate.admit(tenant, MODEL, 1)
    with pytest.raises(RateLimited, match="2 requests at once"):
        gate.admit(tenant, MODEL, 1)

    first.end(5)
    first.end(5)  # ending twice frees one place

    gate.admit(tenant, MODEL, 1)
    with pytest.raises(RateLimited):
        gate.admit(tenant, MODEL, 1)


def test_one_callers_limit_is_not_anothers(gate: Gate) -> None:
    assert num_admitted(gate, Tenant("a", requests_per_minute=3), 10) == 3
    assert num_admitted(gate, Tenant("b", requests_per_minute=3), 10) == 3


def test_a_key_is_for_its_models_under_any_of_their_names(gate: Gate) -> None:
    gate.admit(Tenant("a", models=frozenset({"alias"})), MODEL, 1)

    with pytest.raises(Forbidden, match="not for model 'llama'"):
        gate.admit(Tenant("a", models=frozenset({"other"})), MODEL, 1)


def test_usage_is_counted_by_caller_and_model(gate: Gate) -> None:
    tenant = Tenant("a", requests_per_minute=2)
    admissions: list[Admission] = [gate.admit(tenant, MODEL, 10), gate.admit(tenant, MODEL, 5)]
    assert num_admitted(gate, tenant, 3) == 0
    for admission in admissions:
        admission.end(7)

    usage = gate.usage["a", "llama"]
    assert (usage.num_requests, usage.num_refused) == (2, 3)
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (15, 14)


# -- several processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 60, 601, 1000])
def test_shares_of_a_limit_add_up_to_it(limit: int) -> None:
    assert sum(Share(rank, 4).of(limit) for rank in range(4)) == limit


@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_limits_hold_within_5_percent_over_four_ingresses(clock: Clock, kind: str) -> None:
    """Requests at 3 times the limit for five minutes, spread in turn as the balancer does."""
    gates = [Gate(clock) for _ in range(4)]
    for rank, gate in enumerate(gates):
        gate.read_share = partial(Share, rank, 4)
    limit = 600
    tenant = Tenant("a", **{f"{kind}_per_minute": limit * (1 if kind == "requests" else 50)})
    admitted = 0
    for number in range(5 * 3 * limit):
        clock.now_s += 60 / (3 * limit)
        admitted += num_admitted(gates[number % 4], tenant, 1, num_tokens=50)

    assert 0.95 * 5 * limit <= admitted <= 1.05 * 5 * limit


# -- the window ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 30)), max_size=60),
    st.integers(1, 100),
)
def test_no_minute_holds_more_than_the_limit_but_for_one_that_is_larger_itself(
    uses: list[tuple[float, int]], limit: int
) -> None:
    window, now_s = Window(), 0.0
    let_in: list[tuple[float, int]] = []
    for pause_s, amount in uses:
        now_s += pause_s
        wait_s = window.wait_s(amount, limit, now_s)
        assert not math.isnan(wait_s)
        if wait_s == 0:
            window.add(amount, now_s)
            let_in.append((now_s, amount))

    for start_s, first in let_in:
        in_minute = sum(min(amount, limit) for at_s, amount in let_in if start_s <= at_s < start_s + 60)
        assert in_minute <= max(limit, min(first, limit))
    assert window.used(now_s + 100) == 0
