"""Requests that belong together go together, where that costs nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica

NUM_REPLICAS = 4


async def where(edge: Any, number: int, headers: dict[str, str], **fields: Any) -> str:
    """Which replica a request goes to that shares nothing with those of other numbers."""
    body = {"model": "tiny", "prompt": f"{number:04} {'x' * 60}", "max_tokens": 1, **fields}
    answer = await edge.client.post("/v1/completions", headers={"X-Shoal-Explain": "1", **headers}, json=body)
    return answer.json()["shoal"]["choices"][0]["replica"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({"X-Session-Id": "s"}, {}), ({}, {"prompt_cache_key": "s"}), ({"X-Session-Id": "s"}, {"prompt_cache_key": "t"})],
)  # fmt: skip
async def test_requests_of_one_session_gather(
    make_edge, headers: dict[str, str], fields: dict[str, str]
) -> None:
    edge = await make_edge(*(ScriptedReplica() for _ in range(NUM_REPLICAS)))

    alone = {await where(edge, number, {}) for number in range(12)}
    gathered = {await where(edge, number, headers, **fields) for number in range(12)}

    assert len(alone) > 1
    assert len(gathered) == 1


async def test_a_session_goes_to_the_same_replica_from_every_ingress(make_edge) -> None:
    first = await make_edge(*(ScriptedReplica() for _ in range(NUM_REPLICAS)))
    second = await make_edge(membership=first.membership)
    await second.until(lambda: len(second.replica_set.open_views) == NUM_REPLICAS)

    for number in range(8):
        session = {"X-Session-Id": f"session-{number}"}
        assert await where(first, 1, session) == await where(second, 2, session)


async def test_sessions_spread_over_all_replicas(make_edge) -> None:
    edge = await make_edge(*(ScriptedReplica() for _ in range(NUM_REPLICAS)))

    taken = Counter([await where(edge, 0, {"X-Session-Id": str(number)}) for number in range(64)])

    assert len(taken) == NUM_REPLICAS
    assert max(taken.values()) <= 32


async def test_a_session_leaves_a_replica_that_has_much_to_do(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), ScriptedReplica())
    session = {"X-Session-Id": "s"}
    first = await where(edge, 1, session)

    view = next(view for view in edge.replica_set.open_views if view.replica_id == first)
    view.book("much", 1_000_000, [])

    assert await where(edge, 2, session) != first
