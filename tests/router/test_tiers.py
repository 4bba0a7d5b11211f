"""What an ingress knows of a replica with host memory: what its engine has where, however it came to know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.engine.cache_log import DEVICE, HOST

SMALL = {"num_blocks": 24, "num_host_blocks": 200, "max_model_len": 256, "max_num_batched_tokens": 64}


async def ask(edge: Any, replica: Any, prompt: str, **fields: Any) -> dict[str, Any]:
    """An answer from a replica that steps until it has given it."""
    answer = asyncio.create_task(
        edge.client.post(
            "/v1/completions",
            headers={"X-Shoal-Explain": "1"},
            json={"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields},
        )
    )
    while not answer.done():
        replica.step()
        await asyncio.sleep(0)
    await replica.run()
    return (await answer).json()


def told(edge: Any) -> tuple[set[bytes], set[bytes]]:
    """What the ingress believes to be on the device, and on the host alone."""
    (stream,) = edge.replica_set.streams
    held = edge.replica_set.index._held.get(stream.index_key)
    tiers = dict(held or ())
    return {h for h, tier in tiers.items() if tier == DEVICE}, {
        h for h, tier in tiers.items() if tier == HOST
    }


def has(replica: Any) -> tuple[set[bytes], set[bytes]]:
    """What the engine has there."""
    snapshot = replica.engine.cache_snapshot()
    return set(snapshot.hashes), set(snapshot.host_hashes)


@pytest.fixture
async def served(make_edge, byte_vocabulary, engine_replica):
    """An ingress, and a replica whose device holds two of the prompts that it has had."""
    replica = engine_replica.EngineReplica(byte_vocabulary, limits=SMALL)
    edge = await make_edge(replica, max_model_len=256)
    for number in range(8):
        await ask(edge, replica, f"{number:02}" * 64)
    assert has(replica)[1], "nothing has gone to the host"
    return edge, replica


async def test_each_move_between_the_tiers_is_heard_and_none_is_taken_for_a_gap(served) -> None:
    edge, replica = served

    await edge.until(lambda: told(edge) == has(replica))

    assert replica.num_snapshots == 1  # when the ingress attached
    edge.replica_set.index.check()


async def test_an_ingress_that_comes_later_knows_the_same(served, make_edge) -> None:
    edge, replica = served

    late = await make_edge(membership=edge.membership, max_model_len=256)

    await edge.until(lambda: bool(late.replica_set.open_views) and told(late) == has(replica))
    await ask(late, replica, "late" * 32)
    await edge.until(lambda: told(late) == told(edge) == has(replica))


async def test_a_prompt_on_the_host_is_foreseen_and_found_there(served) -> None:
    edge, replica = served
    await edge.until(lambda: told(edge) == has(replica))

    (choice,) = (await ask(edge, replica, "00" * 64 + "and more"))["shoal"]["choices"]

    (candidate,) = choice["placements"][0]["candidates"]
    assert candidate["predicted_cached_tokens"] == choice["cached_tokens"]
    # The beginning may not have been handed out yet.
    assert choice["cached_tokens"]["device"] + choice["cached_tokens"]["host"] == 128
    assert choice["cached_tokens"]["host"] >= 64
    assert 0 < candidate["copy_s"] < candidate["work_s"]
