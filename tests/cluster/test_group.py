"""Ranks of several hosts need an address in common."""

from __future__ import annotations

import pytest

from cluster.group import check_reach
from cluster.rank_actor import RankPlace
from workers.engine.errors import InvalidRequest


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
