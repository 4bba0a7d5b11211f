"""A request that asks is told where it went, what else was weighed, and where its time went."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cluster.proto import shoal_pb2 as pb
from cluster.wire import split_hashes
from router.scripted_replica import ScriptedReplica

EXPLAIN = {"X-Shoal-Explain": "1"}


async def ask(edge: Any, headers: dict[str, str] = EXPLAIN, **fields: Any):
    body = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 3, "ignore_eos": True, **fields}
    return await edge.client.post("/v1/completions", headers=headers, json=body)


def explanation_of(stream: str) -> dict[str, Any]:
    *_, told, done = [line for line in stream.splitlines() if line]
    assert done == "data: [DONE]"
    return json.loads(told.removeprefix("data: "))["shoal"]


async def test_an_answer_explains_itself_where_asked(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), ScriptedReplica())

    told = (await ask(edge, {**EXPLAIN, "x-request-id": "mine"})).json()["shoal"]

    assert told["request_id"] == "mine"
    (choice,) = told["choices"]
    (placement,) = choice["placements"]
    assert choice["replica"] == placement["replica"] == placement["candidates"][0]["replica"]
    assert {one["replica"] for one in placement["candidates"]} == {"replica-0", "replica-1"}
    assert all(one["cost_s"] > 0 for one in placement["candidates"])
    assert choice["cached_tokens"] == {"device": 0, "host": 0}
    assert choice["queue_s"] == 0.25
    assert (choice["num_preemptions"], choice["num_migrations"]) == (0, 0)


async def test_candidates_are_explained_by_tier_and_by_what_their_start_is_made_of(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(load=pb.Load(per_token_s=1e-3, copy_base_s=0.001, copy_block_s=0.002))
    )
    await ask(edge)
    (replica,) = edge.replicas
    hashes = split_hashes(replica.submits[0].block_hashes)
    replica.send_cache(hashes[:1], offloaded=hashes[1:])
    (view,) = edge.replica_set.open_views
    (stream,) = edge.replica_set.streams
    await edge.until(lambda: edge.replica_set.index.num_hashes_of(stream.index_key) == len(hashes))

    ((one,),) = [
        placement["candidates"]
        for choice in (await ask(edge)).json()["shoal"]["choices"]
        for placement in choice["placements"]
    ]

    size = view.shape.block_size
    assert one["predicted_cached_tokens"] == {"device": size, "host": (len(hashes) - 1) * size}
    assert one["copy_s"] == round(0.001 + (len(hashes) - 1) * 0.002, 6)
    assert one["cost_s"] >= one["wait_s"] + one["copy_s"] + one["work_s"] - 1e-5
    assert replica.num_resyncs == 0


async def test_a_stream_ends_with_its_explanation(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    told = explanation_of((await ask(edge, stream=True, n=2)).text)

    assert [choice["index"] for choice in told["choices"]] == [0, 1]


async def test_nobody_is_told_without_asking(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    assert "shoal" not in (await ask(edge, {})).json()
    assert "shoal" not in (await ask(edge, {"X-Shoal-Explain": "0"})).json()
    assert '"shoal"' not in (await ask(edge, {}, stream=True)).text


async def test_a_migration_is_told_with_its_reason(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), ScriptedReplica(step_s=None))
    answer = asyncio.create_task(ask(edge))
    await edge.until(lambda: any(replica.submits for replica in edge.replicas))
    first = next(replica for replica in edge.replicas if replica.submits)
    other = next(replica for replica in edge.replicas if replica is not first)
    first.step()
    await edge.until(lambda: bool(edge.replica_set.num_placed))
    first.drain(0.0)
    first.abort_all()
    await other.until(lambda: bool(other.submits))
    for _ in range(3):
        other.step()

    (choice,) = (await answer).json()["shoal"]["choices"]

    assert choice["num_migrations"] == 1
    assert [one["replica"] for one in choice["placements"]] == [first.replica_id, other.replica_id]
    assert choice["placements"][0]["lost"] is not None
    assert choice["placements"][1]["lost"] is None


async def test_a_request_that_still_runs_tells_how_long_it_has_decoded(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    (replica,) = edge.replicas
    answer = asyncio.create_task(ask(edge, {"x-request-id": "mine"}, max_tokens=3))
    await replica.until(lambda: bool(replica.submits))

    async def decoded_s() -> float:
        told = (await edge.client.get("/v1/shoal/requests/mine")).json()
        return told["choices"][0]["decode_s"]

    for _ in range(2):
        replica.step()
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while not await decoded_s():  # noqa: ASYNC110  # told over HTTP alone
            await asyncio.sleep(0.001)

    replica.step()
    await answer
