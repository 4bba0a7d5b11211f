"""Callers in contention take turns before the replicas; who is alone waits for nobody."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import Limits
from router.scripted_replica import ScriptedReplica
from router.tenancy.fair_line import MEMORY_S, FairLine
from router.tenancy.keys import KeyRing, Tenant, digest_of


def order_of(line: FairLine[str], price: int = 10) -> list[str]:
    """All that waits, in the order in which it leaves; each costs its caller the same."""
    order = []
    while len(line):
        item = line.pop()
        line.charge(item[0], price, 0)
        line.check()
        order.append(item)
    return order


def filled(*items: str) -> FairLine[str]:
    """Items of the caller that their first letter names."""
    line: FairLine[str] = FairLine()
    for item in items:
        line.join(item[0], item)
    return line


def test_callers_take_turns_and_each_is_served_in_order() -> None:
    order = order_of(filled("a1", "a2", "a3", "b1", "b2"))

    assert order == ["b1", "a1", "b2", "a2", "a3"]


def test_who_has_been_served_more_waits_longer() -> None:
    line = filled("a1", "a2", "b1", "b2", "b3")
    line.charge("a", 0, 5)  # as much as 20 prompt tokens

    assert order_of(line) == ["b1", "b2", "a1", "b3", "a2"]


def test_nobody_saves_up_while_away() -> None:
    line = filled("a1", "a2")
    order_of(line, price=1000)

    for item in ("a3", "a4", "b1", "b2"):
        line.join(item[0], item)

    assert order_of(line) == ["b1", "a3", "b2", "a4"]


def test_who_no_longer_wants_to_go_leaves_no_trace() -> None:
    line = filled("a1", "b1")

    assert line.leave("b", "b1")
    assert not line.leave("b", "b1")
    line.check()
    assert order_of(line) == ["a1"]


def test_a_caller_is_alone_until_another_comes_and_again_when_that_is_long_gone() -> None:
    line: FairLine[str] = FairLine()

    assert not line.see("a", 0.0)
    assert line.see("b", 1.0)
    assert line.see("a", 2.0)
    assert not line.see("a", 2.0 + 2 * MEMORY_S)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "pop", "leave"])), max_size=60))
def test_nothing_is_lost_or_comes_out_twice(steps: list[tuple[str, str]]) -> None:
    line: FairLine[str] = FairLine()
    inside: set[str] = set()
    for number, (caller, what) in enumerate(steps):
        item = f"{caller}{number}"
        if what == "join":
            line.join(caller, item)
            inside.add(item)
        elif what == "pop" and inside:
            popped = line.pop()
            line.charge(popped[0], 7, 1)
            inside.remove(popped)
        elif what == "leave":
            mine = sorted(one for one in inside if one[0] == caller)
            if mine:
                assert line.leave(caller, mine[0])
                inside.remove(mine[0])
        line.check()
        assert len(line) == len(inside)
    assert set(order_of(line)) == inside


# -- at the edge --------------------------------------------------------------------------------------------


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


@pytest.fixture
async def edge(make_edge: Any) -> Any:
    ring = KeyRing([Tenant(name, digest_of(f"sk-{name}")) for name in ("noisy", "quiet")])
    replica = ScriptedReplica(step_s=None, max_num_seqs=1)
    found = await make_edge(replica, keys=ring, limits=Limits(max_waiting_per_replica=8))
    for name in ("noisy", "quiet"):
        await until_answered(found, [ask(found, name)])
    replica.load.num_waiting = 1  # all that it takes in advance
    replica.step()
    await found.until(lambda: not found.replica_set.open_views[0].has_room)
    return found


def ask(edge: Any, name: str) -> asyncio.Task[Any]:
    body = {"model": "tiny", "prompt": name, "max_tokens": 1}
    return asyncio.create_task(edge.client.post("/v1/completions", json=body, headers=key(name)))


async def until_answered(edge: Any, asked: list[asyncio.Task[Any]]) -> None:
    while not all(one.done() for one in asked):
        edge.replica.step()
        await asyncio.sleep(0)


def callers(edge: Any, start: int) -> list[str]:
    return [submit.tenant for submit in edge.replica.submits[start:]]


async def test_a_flood_waits_here_and_others_go_past_it(edge: Any) -> None:
    start = len(edge.replica.submits)
    flood = [ask(edge, "noisy") for _ in range(6)]
    await edge.until(lambda: edge.replica_set.num_held == 6)
    late = ask(edge, "quiet")
    await edge.until(lambda: edge.replica_set.num_held == 7)
    assert callers(edge, start) == []

    edge.replica.load.num_waiting = 0
    edge.replica.step()
    await edge.until(lambda: len(edge.replica.submits) > start)
    assert edge.replica.num_held_tokens > 0  # the autoscaler is to know of them
    await until_answered(edge, [*flood, late])
    assert edge.replica.num_held_tokens == 0

    assert [one.result().status_code for one in (*flood, late)] == [200] * 7
    assert callers(edge, start).index("quiet") <= 1
    assert edge.replica_set.num_held == 0


async def test_who_fills_the_line_is_refused_and_others_are_not(edge: Any) -> None:
    flood = [ask(edge, "noisy") for _ in range(9)]
    await edge.until(lambda: any(one.done() for one in flood))
    (refused,) = [one.result() for one in flood if one.done()]
    others = ask(edge, "quiet")
    await edge.until(lambda: edge.replica_set.num_held == 9)

    assert refused.status_code == 429
    edge.replica.load.num_waiting = 0
    await until_answered(edge, [*flood, others])
    assert others.result().status_code == 200


async def test_a_client_that_leaves_gives_its_place_in_line_back(edge: Any) -> None:
    waiting = [ask(edge, "noisy"), ask(edge, "quiet")]
    await edge.until(lambda: edge.replica_set.num_held == 2)

    waiting[0].cancel()
    await edge.until(lambda: edge.replica_set.num_held == 1)

    edge.replica.load.num_waiting = 0
    await until_answered(edge, waiting[1:])
    assert waiting[1].result().status_code == 200


async def test_those_in_line_are_not_forgotten_when_the_replica_dies(edge: Any) -> None:
    waiting = [ask(edge, "noisy"), ask(edge, "quiet")]
    await edge.until(lambda: edge.replica_set.num_held == 2)

    await edge.replica.kill()
    edge.replica.load.num_waiting = 0
    await edge.replica.start()
    await edge.until(lambda: bool(edge.replica_set.open_views))

    await until_answered(edge, waiting)
    assert [one.result().status_code for one in waiting] == [200, 200]


def test_the_order_does_not_depend_on_chance() -> None:
    rng = random.Random(3)
    items = [f"{rng.choice('abcd')}{number}" for number in range(50)]

    assert order_of(filled(*items)) == order_of(filled(*items))
