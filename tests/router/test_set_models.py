"""An ingress whose models change while it runs: what stays is not disturbed, what leaves ends its requests first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router import ingress as ingress_module
from router.scripted_replica import ScriptedReplica

LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_RETIRE_POLL_S", 0.01)


async def names(edge: Any) -> set[str]:
    return {one["id"] for one in (await edge.client.get("/v1/models")).json()["data"]}


async def test_models_come_and_go_and_the_one_that_stays_keeps_its_stream(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=0.002, script=lambda submit: [97] * 300))
    (tiny,) = edge.ingress.models
    other = replace(tiny.config, names=("other",))
    stream = asyncio.create_task(edge.complete(**LONG))
    await edge.until(lambda: tiny.replicas.num_placed == 1)

    await edge.ingress.set_models([tiny.config, other])
    assert await names(edge) == {"tiny", "alias", "other"}
    assert edge.ingress.models[0] is tiny
    second = edge.ingress.models[1]
    await edge.until(lambda: len(second.replicas.open_views) == 1)
    assert (await edge.complete(model="other", max_tokens=2)).status_code == 200

    await edge.ingress.set_models([tiny.config])
    assert await names(edge) == {"tiny", "alias"}
    assert (await edge.complete(model="other", max_tokens=2)).status_code == 404
    await edge.until(lambda: not second.replicas.streams)

    answer = await stream
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") >= 300


async def test_another_number_of_replicas_is_told_and_makes_no_other_model(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"min_replicas": 1})
    (tiny,) = edge.ingress.models

    await edge.ingress.set_models([replace(tiny.config, min_replicas=3)])

    assert edge.ingress.models == [tiny]
    state = (await edge.client.get("/health")).json()["models"]["tiny"]
    assert (state["min_replicas"], state["num_replicas"]) == (3, 1)


async def test_a_model_that_leaves_finishes_its_requests(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=0.002, script=lambda submit: [97] * 300))
    (tiny,) = edge.ingress.models
    stream = asyncio.create_task(edge.complete(**LONG))
    await edge.until(lambda: tiny.replicas.num_placed == 1)

    await edge.ingress.set_models([replace(tiny.config, max_model_len=2048)])

    assert (await stream).text.endswith("data: [DONE]\n\n")
    await edge.until(lambda: not tiny.replicas.streams)
