"""Replicas that come with load and go without it, on a cluster that speaks by formula."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from deploy.served_cluster import ServedCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_STREAMS, NUM_TOKENS = 100, 200


async def num_replicas(client: httpx.AsyncClient, cluster: ServedCluster) -> int:
    states = (await client.get(f"{cluster.url}/health")).json()["models"]
    return sum(state["num_open_replicas"] for state in states.values())


async def stream(client: httpx.AsyncClient, cluster: ServedCluster, number: int) -> bool:
    """True if it came to its proper end with all of its tokens counted."""
    body = {
        "model": cluster.model,
        "prompt": f"Stream {number}",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    return lines[-1] == "data: [DONE]" and f'"completion_tokens":{NUM_TOKENS}' in lines[-2]


async def until(client: httpx.AsyncClient, cluster: ServedCluster, count: int, timeout_s: float) -> float:
    """Seconds until ``count`` replicas are there."""
    started_s = time.monotonic()
    while await num_replicas(client, cluster) != count:
        assert time.monotonic() - started_s < timeout_s, f"not {count} replicas within {timeout_s} s"
        await asyncio.sleep(0.2)
    return time.monotonic() - started_s


def test_replicas_follow_the_load_up_and_down_to_zero_and_no_stream_is_cut(
    start_cluster: Callable[..., ServedCluster],
) -> None:
    cluster = start_cluster(
        *("--scripted", "--scripted-step-s", "0.03", "--max-num-seqs", "16", "--target-tpot-s", "0.05"),
        *("--replicas", "1", "--max-replicas", "3", "--min-replicas", "0"),
        *("--downscale-delay-s", "4", "--scale-to-zero-delay-s", "4"),
    )
    cluster.wait_until_up()

    async def scenario() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            streams = []
            for number in range(NUM_STREAMS):
                streams.append(asyncio.create_task(stream(client, cluster, number)))
                await asyncio.sleep(0.05)  # the pace of arrivals, not a wait for anything
            up_s = await until(client, cluster, 3, timeout_s=40)
            assert all(await asyncio.gather(*streams))
            down_s = await until(client, cluster, 0, timeout_s=90)
            assert (await client.get(f"{cluster.url}/health")).status_code == 200
            started_s = time.monotonic()
            woken = await asyncio.gather(*(stream(client, cluster, number) for number in range(8)))
            print(f"three {up_s:.1f} s after the burst, none {down_s:.1f} s after its end,", end=" ")
            print(f"eight streams of a sleeping model in {time.monotonic() - started_s:.1f} s")
            assert all(woken)

    asyncio.run(scenario())
