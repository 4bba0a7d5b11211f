"""Requests that begin alike gather at one replica, whichever ingress each of them came to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

PROMPT = "A long beginning that all of them share. " * 20


async def edges_before(make_edge: Any, replicas: list[Any]) -> tuple[Any, Any]:
    first = await make_edge(*replicas)
    second = await make_edge(membership=first.membership)
    await second.until(lambda: len(second.replica_set.open_views) == len(replicas))
    return first, second


def num_coming(edge: Any) -> int:
    return sum(len(view._coming) for view in edge.replica_set.open_views)


async def placed(edge: Any, replicas: list[Any], **fields: Any) -> tuple[asyncio.Task[Any], Any]:
    """Send a request; the replica that it came to, which has not taken a step since."""
    before = [len(replica.requests) for replica in replicas]
    answer = asyncio.create_task(edge.complete(prompt=PROMPT, max_tokens=4, **fields))
    await edge.until(lambda: [len(replica.requests) for replica in replicas] != before)
    return answer, next(r for r, count in zip(replicas, before, strict=True) if len(r.requests) > count)


async def test_a_sibling_is_weighed_with_what_another_ingress_has_sent(
    make_edge, byte_vocabulary, engine_replica
) -> None:
    replicas = [engine_replica.EngineReplica(byte_vocabulary) for _ in range(3)]
    first, second = await edges_before(make_edge, replicas)
    one, its_replica = await placed(first, replicas)
    await second.until(lambda: num_coming(second) == 1)

    two, sibling_replica = await placed(second, replicas)
    (journal,) = [
        choice.journal
        for running in second.ingress.ledger._running.values()
        for choice in running.generation.choices
    ]
    expected = {
        ranked.candidate.view.replica_id: ranked.candidate.num_hit_tokens
        for ranked in journal.placements[0].ranked
    }

    assert expected.pop(its_replica.replica_id) == len(PROMPT) // 16 * 16
    assert set(expected.values()) == {0}
    for replica in {id(one): one for one in (its_replica, sibling_replica)}.values():
        await replica.run()
    assert [(await answer).status_code for answer in (one, two)] == [200, 200]


async def test_what_was_coming_is_forgotten_with_the_first_token(
    make_edge, byte_vocabulary, engine_replica
) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    first, second = await edges_before(make_edge, [replica])
    answer, _ = await placed(first, [replica])
    await second.until(lambda: num_coming(second) == 1)
    assert num_coming(first) == 0

    await replica.run()

    await second.until(lambda: num_coming(second) == 0)
    assert (await answer).status_code == 200


@pytest.mark.parametrize("leaves", ["client", "ingress"])
async def test_what_was_coming_is_forgotten_when_its_request_goes(
    make_edge, byte_vocabulary, engine_replica, leaves: str
) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    second, first = await edges_before(make_edge, [replica])
    answer, _ = await placed(first, [replica])
    await second.until(lambda: num_coming(second) == 1)

    if leaves == "client":
        answer.cancel()
    else:
        await first.ingress.stop()

    await second.until(lambda: num_coming(second) == 0)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
