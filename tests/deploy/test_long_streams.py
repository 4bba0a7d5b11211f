"""Streams that outlive every time-out on their way, while the ingress is scaled and rolled out before them.

HAProxy cuts connections 120 s after it has loaded a new configuration, if nobody tells it otherwise; the streams here
go on for longer than that after the last change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.deployed_cluster import DeployedCluster

NUM_TOKENS, STEP_S = 600, 0.4
HAPROXY_CUTS_AFTER_S = 120.0
"""By default, after each change of its configuration."""


@pytest.fixture(scope="module")
def deployed() -> Iterator[DeployedCluster]:
    engine = {"scripted": True, "scripted_step_s": STEP_S, "max_model_len": 4096}
    found = DeployedCluster(engine, num_replicas=1)
    yield found
    found.stop()


async def ask(client: httpx.AsyncClient, cluster: DeployedCluster, **fields: Any) -> str:
    """The text of one long answer, which must be whole."""
    body = {
        "model": cluster.model, "prompt": "A long story", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7,
        **fields,
    }  # fmt: skip
    if not fields.get("stream"):
        answer = await client.post(f"{cluster.url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
        return str(answer.json()["choices"][0]["text"])
    text, is_done = "", False
    async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            is_done = is_done or line == "data: [DONE]"
            if line.startswith("data: {"):
                text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
    assert is_done
    return text


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
async def test_a_stream_outlives_every_change_of_the_ingress_and_every_default_time_out(
    deployed: DeployedCluster,
) -> None:
    async with httpx.AsyncClient(timeout=httpx.Timeout(30.0, read=None)) as client:
        answers = [
            asyncio.create_task(ask(client, deployed, stream=number % 4 != 3, temperature=1.0))
            for number in range(12)
        ]
        began_s = time.monotonic()
        await asyncio.to_thread(deployed.scale_ingress, 4)
        await asyncio.to_thread(deployed.scale_ingress, 1)
        await asyncio.to_thread(deployed.roll_ingress)
        changed_s = time.monotonic()
        assert not any(one.done() for one in answers)

        texts = await asyncio.gather(*answers)

    after_s = time.monotonic() - changed_s
    print(f"changes took {changed_s - began_s:.0f} s, the streams went on for {after_s:.0f} s")
    assert after_s > HAPROXY_CUTS_AFTER_S
    assert len(texts[0]) > NUM_TOKENS
    assert set(texts) == {texts[0]}
