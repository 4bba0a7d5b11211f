"""Ranks of several hosts need an address in common; while they start, the loss of one ends the wait for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cluster.group import check_reach, gather_unless_lost
from cluster.rank_actor import RankPlace
from workers.engine.errors import InvalidRequest, RankLost


def places(*addresses: str) -> list[RankPlace]:
    return [RankPlace(f"node{index}", address, 100 + index) for index, address in enumerate(addresses)]


def test_ranks_of_two_hosts_cannot_meet_on_loopback() -> None:
    with pytest.raises(InvalidRequest, match=r"run on 2 hosts \(10.0.0.1, 10.0.0.2\): give an address"):
        check_reach(places("10.0.0.1", "10.0.0.2"), "127.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1"])
def test_ranks_of_two_hosts_meet_elsewhere(host: str) -> None:
    check_reach(places("10.0.0.1", "10.0.0.2"), host)


def test_two_nodes_of_one_host_may_use_loopback() -> None:
    check_reach(places("127.0.0.1", "127.0.0.1"), "127.0.0.1")


async def answer(number: int) -> int:
    return number


async def never() -> int:
    return await asyncio.get_running_loop().create_future()


async def fail() -> int:
    raise RuntimeError("connection closed by peer")


def lost_soon() -> asyncio.Future[str]:
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()
    loop.call_later(0.05, lost.set_result, "rank 1 is stopped")
    return lost


@pytest.mark.parametrize("other", [never, fail])
async def test_a_rank_that_is_lost_is_named_whatever_the_others_do(
    other: Callable[[], Awaitable[int]],
) -> None:
    with pytest.raises(RankLost, match="rank 1 is stopped"):
        await asyncio.wait_for(gather_unless_lost([other(), never()], lost_soon()), 10)


async def test_answers_and_errors_of_a_whole_group_are_told() -> None:
    whole: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    assert await gather_unless_lost([answer(0), answer(1)], whole) == [0, 1]
    with pytest.raises(RuntimeError, match="closed by peer"):
        await gather_unless_lost([answer(0), fail()], whole)
    assert not whole.done()
