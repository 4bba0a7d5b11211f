"""The chaos benchmark: it says what happened to the streams, and nothing bad happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import orjson
import pytest

from deploy.bench.chaos import ChaosResult, run_round
from deploy.bench.faults import CHANGES, FAULTS, C, Fault
from deploy.bench.streams import WARM_CHUNKS, StreamPlan, StreamRecord, run_streams_beside
from deploy.deployed_cluster import DeployedCluster
from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import ShoalError


def run(cluster: C, fault: Fault[C], plan: StreamPlan) -> ChaosResult:
    """One round, printed; no stream may end in another way than unbroken, those that have ended aside."""
    result = asyncio.run(run_round(cluster, fault, plan))
    print(result)
    assert result.num_ended == result.num_streams
    assert result.num_greedy_intact == result.num_greedy > 0
    return result


def test_the_longest_gap_of_a_stream_is_between_two_chunks() -> None:
    assert StreamRecord(arrivals_s=[1.0, 1.5, 4.0, 4.25]).longest_gap_s == 2.5
    assert StreamRecord(arrivals_s=[1.0]).longest_gap_s == 0.0


class Text(httpx.AsyncByteStream):
    """A stream of ``num_chunks`` chunks; whether its end comes after them."""

    def __init__(self, num_chunks: int, is_whole: bool) -> None:
        self._num_chunks = num_chunks
        self._is_whole = is_whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._num_chunks):
            await asyncio.sleep(0)
            yield b'data: {"choices": [{"text": "a"}]}\n\n'
        if self._is_whole:
            yield b"data: [DONE]\n\n"


async def test_streams_begin_again_until_what_happens_beside_them_is_over_and_broken_ones_do_not() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        is_whole = orjson.loads(request.content)["seed"] == 0
        return httpx.Response(200, stream=Text(WARM_CHUNKS, is_whole))

    async def event(runs: list[list[StreamRecord]]) -> None:
        while len(runs[0]) < 5:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        whole, broken = await run_streams_beside(client, "http://here", "m", StreamPlan(2, 8, 0.0), event)

    assert [one.is_done for one in whole] == [True] * len(whole)
    assert {one.text for one in whole} == {"a" * WARM_CHUNKS}
    assert len(whole) >= 5
    assert [one.is_done for one in broken] == [False]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [one for one in FAULTS if one.spares_streams], ids=lambda one: one.name)
def test_all_greedy_streams_end_as_if_no_process_had_been_harmed(cluster: ServedCluster, fault) -> None:
    result = run(cluster, fault, StreamPlan(num_streams=8, output_len=120, temperature=1.0))

    assert (result.num_moved > 0) == fault.loses_replica
    assert (result.replica_back_s is not None) == fault.loses_replica


@pytest.fixture(scope="module")
def deployed(demo_model: ModelFiles) -> Iterator[DeployedCluster]:
    """Three replicas that give their streams two seconds to end when they are taken away."""
    engine = {"max_model_len": 1024, "kv_cache_gib": 0.25, "cpu_threads": 1, "drain_timeout_s": 2}
    found = DeployedCluster(engine, num_replicas=3)
    yield found
    found.stop()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", CHANGES, ids=lambda one: one.name)
def test_all_greedy_streams_end_as_if_nothing_had_changed(deployed: DeployedCluster, fault) -> None:
    result = run(deployed, fault, StreamPlan(num_streams=32, output_len=100, temperature=1.0))

    assert result.num_under_way > 0
    assert result.num_moved > 0 or not fault.loses_replica


@pytest.mark.cluster
@pytest.mark.slow
def test_a_round_without_a_process_to_strike_says_so(cluster: ServedCluster) -> None:
    with pytest.raises(ShoalError, match="0 processes with no-such-thing"):
        cluster.busiest("no-such-thing")
