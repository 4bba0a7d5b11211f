"""An endpoint that is being stopped: nobody is let in, who is in has time, and who is left is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router import ingress as ingress_module
from router.config import Timeouts
from router.scripted_replica import ScriptedReplica

LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_DRAIN_POLL_S", 0.005)


def slow_replica(step_s: float) -> ScriptedReplica:
    return ScriptedReplica(step_s=step_s, script=lambda submit: [97] * 300)


async def test_who_is_in_has_the_whole_answer_and_nobody_else_is_let_in(make_edge) -> None:
    edge = await make_edge(slow_replica(0.002))
    stream = asyncio.create_task(edge.complete(max_tokens=200, ignore_eos=True, stream=True))
    await edge.until(lambda: edge.replica_set.num_placed == 1)
    draining = asyncio.create_task(edge.ingress.drain(30.0))
    await edge.until(lambda: edge.ingress.gate.is_closed)

    refused = await edge.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    assert not any(name.startswith("x-ratelimit") for name in refused.headers)
    health = await edge.client.get("/health")
    assert "retry-after" in health.headers
    assert (health.status_code, health.json()["status"]) == (503, "shutting down")
    assert (await edge.client.get("/health/live")).status_code == 200

    assert (await stream).text.endswith("data: [DONE]\n\n")
    assert await draining == 0


async def test_who_is_not_done_in_time_is_told_by_the_last_event(make_edge) -> None:
    edge = await make_edge(slow_replica(0.1))
    stream = asyncio.create_task(edge.complete(stream=True, **LONG))
    whole = asyncio.create_task(edge.complete(**LONG))
    await edge.until(lambda: edge.replica_set.num_placed == 2)

    assert await edge.ingress.drain(0.1) == 2

    last = (await stream).text.strip().rsplit("\n\n", 1)[1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert (await whole).status_code == 503
    await edge.until(lambda: edge.replica.num_running == 0)


async def test_who_waits_for_a_replica_is_told_at_once(make_edge) -> None:
    edge = await make_edge(slow_replica(0.002), timeouts=Timeouts(replica_wait_s=60.0))
    await edge.replica.kill()
    await edge.until(lambda: not edge.replica_set.open_views)
    waiting = asyncio.create_task(edge.complete(stream=True))
    await edge.until(lambda: edge.replica_set.num_held == 1)

    assert await edge.ingress.drain(0.01) == 1

    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
