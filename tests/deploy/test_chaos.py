"""The chaos benchmark, on the session's cluster: it says what happened to the streams."""

from __future__ import annotations

import asyncio

import pytest

from deploy.bench.chaos import FAULTS, ChaosPlan, StreamRecord, run_round
from deploy.served_cluster import ServedCluster
from workers.engine.errors import ShoalError


def test_the_longest_gap_of_a_stream_is_between_two_chunks() -> None:
    assert StreamRecord(arrivals_s=[1.0, 1.5, 4.0, 4.25]).longest_gap_s == 2.5
    assert StreamRecord(arrivals_s=[1.0]).longest_gap_s == 0.0


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [one for one in FAULTS if one.spares_streams], ids=lambda one: one.name)
def test_all_greedy_streams_end_as_if_nothing_had_happened(cluster: ServedCluster, fault) -> None:
    result = asyncio.run(run_round(cluster, fault, ChaosPlan(num_streams=8, output_len=120, temperature=1.0)))

    assert result.num_ended == result.num_streams
    assert result.num_greedy_intact == result.num_greedy == 4
    assert result.replica_back_s > 0


@pytest.mark.cluster
@pytest.mark.slow
def test_a_round_without_a_process_to_strike_says_so(cluster: ServedCluster) -> None:
    with pytest.raises(ShoalError, match="0 processes with no-such-thing"):
        cluster.busiest("no-such-thing")
