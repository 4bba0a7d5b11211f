"""A request can be asked about by its id, at every ingress, by its own key, for a while."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from router import ledger as ledgers
from router.config import Timeouts
from router.generation import Generation
from router.ledger import KEPT_S, Ledger
from router.scripted_replica import ScriptedReplica
from router.tenancy.keys import KeyRing, Tenant, digest_of


async def ask(edge: Any, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 3, "ignore_eos": True, **fields}
    return await edge.client.post("/v1/completions", headers=headers, json=body)


async def about(edge: Any, request_id: str, headers: dict[str, str] | None = None) -> Any:
    return await edge.client.get(f"/v1/shoal/requests/{request_id}", headers=headers)


async def test_an_ended_request_is_told_by_either_of_its_ids(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), ScriptedReplica())
    answer = await ask(edge, {"x-request-id": "mine", "X-Shoal-Explain": "1"})
    told = (await about(edge, answer.json()["id"])).json()

    assert told == (await about(edge, "mine")).json()
    assert (told["object"], told["state"], told["request_id"]) == ("shoal.request", "ended", "mine")
    assert told["choices"] == answer.json()["shoal"]["choices"]


async def test_a_request_that_runs_is_told_as_far_as_it_has_come(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    answer = asyncio.create_task(ask(edge, {"x-request-id": "mine"}))
    await edge.until(lambda: bool(edge.replica.submits))

    told = (await about(edge, "mine")).json()

    assert (told["state"], told["choices"][0]["replica"]) == ("running", "replica-0")
    for _ in range(3):
        edge.replica.step()
    assert (await answer).status_code == 200
    assert (await about(edge, "mine")).json()["state"] == "ended"


async def test_a_request_that_was_cut_off_tells_how(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), timeouts=Timeouts(replica_wait_s=0.05))
    leaving = asyncio.create_task(ask(edge, {"x-request-id": "leaves"}))
    await edge.until(lambda: bool(edge.replica.submits))
    assert (await about(edge, "leaves")).json()["outcome"] == "running"
    leaving.cancel()
    await edge.until(lambda: edge.replica_set.num_placed == 0)
    left = (await about(edge, "leaves")).json()

    losing = asyncio.create_task(ask(edge, {"x-request-id": "loses"}))
    await edge.until(lambda: edge.replica_set.num_placed == 1)
    await edge.replica.kill()
    assert (await losing).status_code == 503
    lost = (await about(edge, "loses")).json()

    assert (left["outcome"], left["choices"][0]["finish_reason"]) == ("client left", None)
    assert lost["outcome"].startswith("failed: no replica of the model")


async def test_a_finished_request_says_so_to_whoever_asks(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    told = (await ask(edge, {"X-Shoal-Explain": "1"})).json()["shoal"]

    assert (told["outcome"], told["choices"][0]["finish_reason"]) == ("finished", "length")


async def test_a_request_is_told_to_its_own_key_alone(make_edge) -> None:
    keys = KeyRing([Tenant("a", digest_of("sk-a")), Tenant("b", digest_of("sk-b"))])
    edge = await make_edge(ScriptedReplica(), keys=keys)
    a, b = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    ids = [(await ask(edge, {**one, "x-request-id": "same"})).json()["id"] for one in (a, b)]

    assert (await about(edge, ids[0], a)).status_code == 200
    assert (await about(edge, ids[0], b)).status_code == 404
    assert (await about(edge, ids[0])).status_code == 401
    assert [(await about(edge, "same", one)).json()["id"] for one in (a, b)] == ids


async def test_an_unknown_request_is_a_404_that_says_what_can_be_asked(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await about(edge, "nobody")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    assert "10 minutes" in answer.json()["error"]["message"]


async def test_every_ingress_tells_of_every_ingresss_requests(
    make_edge, byte_vocabulary, engine_replica
) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    edges = [await make_edge(replica)]
    for _ in range(2):
        edges.append(await make_edge(membership=edges[0].membership))
        await edges[-1].until(lambda: len(edges[-1].replica_set.open_views) == 1)
    answer = asyncio.create_task(ask(edges[1]))
    await edges[1].until(lambda: bool(replica.requests))
    await replica.run()
    request_id = (await answer).json()["id"]

    told = [await about(edge, request_id) for edge in edges]
    unknown = await about(edges[0], "nobody")

    assert [one.json()["id"] for one in told] == [request_id] * 3
    assert told[0].content == told[1].content
    assert unknown.status_code == 404
    assert replica.service.num_questions == 0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def ended(ledger: Ledger, number: int) -> None:
    generation = Generation.__new__(Generation)
    generation.request_id, generation.choices, generation.arrival_s = f"cmpl-{number}", [], 0.0
    generation.failure = None
    ledger.begin(generation, f"http-{number}", "a")
    ledger.end(generation)


def test_a_ledger_forgets_after_a_while() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ended(ledger, 1)
    clock.now_s = KEPT_S / 2
    ended(ledger, 2)

    clock.now_s = KEPT_S

    assert not ledger.find("http-1", "a")
    assert ledger.find("http-2", "a")
    ledger.check()


@pytest.mark.parametrize("bound", [("MAX_ENDED", 3), ("MAX_BYTES", 400)])
def test_a_ledger_does_not_outgrow_its_bounds(
    bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, *bound)
    ledger = Ledger(Clock())

    for number in range(10):
        ended(ledger, number)

    assert len(ledger) == 3
    assert [bool(ledger.find(f"cmpl-{number}", "a")) for number in (6, 7, 9)] == [False, True, True]
    ledger.check()
