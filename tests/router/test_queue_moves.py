"""A queued request moves to the replica that can start it soonest: over HTTP and gRPC, before scripted replicas."""

from __future__ import annotations

import asyncio
import json

from router.journal import Loss
from router.scripted_replica import ScriptedReplica

TEXT = "an answer"


def one_at_a_time() -> ScriptedReplica:
    """A replica that begins a request when the one before has ended; it steps when told to."""
    return ScriptedReplica(step_s=None, script=lambda submit: list(TEXT.encode()), seats=1, max_num_seqs=1)


def members(*replicas: ScriptedReplica) -> dict[str, str]:
    return {replica.replica_id: replica.address for replica in replicas}


async def make_busy_edge(make_edge, num_requests: int = 3, policy: str = "prefix", **fields):
    """An edge with one replica and so many requests there, the first begun; and a replica that it does not know."""
    busy, new = one_at_a_time(), one_at_a_time()
    edge = await make_edge(busy, policy=policy)
    new.replica_id, new.eos_token_ids = "new", busy.eos_token_ids
    await new.start()
    edge.replicas.append(new)
    answers = [
        asyncio.create_task(
            edge.chat(messages=[{"role": "user", "content": f"question {n}"}], seed=n, **fields)
        )
        for n in range(num_requests)
    ]
    num_sent = num_requests * fields.get("n", 1)
    await edge.until(lambda: len(busy.submits) == num_sent)
    busy.step()
    await edge.until(lambda: edge.replica_set.open_views[0].num_booked == num_sent - 1)
    return edge, busy, new, answers


async def make_hesitant_edge(make_edge):
    """An edge amid a move: one of three requests has been asked back, and its old replica has not answered yet."""
    edge, busy, new, answers = await make_busy_edge(make_edge)
    busy.is_hesitant = True
    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: busy.num_asked_back == 1)
    assert edge.replica_set.moves.num_under_way == 1
    return edge, busy, new, answers


async def step_until(replicas: list[ScriptedReplica], answers: list[asyncio.Task]) -> None:
    while not all(answer.done() for answer in answers):
        for replica in replicas:
            replica.step()
        await asyncio.sleep(0.001)


async def test_a_queued_request_goes_to_a_replica_that_joins(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge)

    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: bool(new.submits))
    await step_until([busy, new], answers)

    for answer in answers:
        body = (await answer).json()
        assert body["choices"][0]["message"]["content"] == TEXT
        assert body["usage"]["completion_tokens"] == len(TEXT) + 1
    assert len(busy.released_ids) == len(new.submits) == 1
    moved, original = new.submits[0], next(s for s in busy.submits if s.request_id == busy.released_ids[0])
    assert moved.request_id == original.request_id + ".1"
    assert (moved.prompt_token_ids, moved.params) == (original.prompt_token_ids, original.params)
    assert busy.cancelled_ids == []
    text = (await edge.client.get("/metrics")).text
    assert 'shoal_router_moves_total{model="tiny",outcome="moved",reason="joined"} 1.0' in text
    assert 'shoal_router_resumed_requests_total{model="tiny"} 0.0' in text


async def test_a_queued_request_goes_where_room_comes_sooner_than_was_forecast(make_edge) -> None:
    first, second = one_at_a_time(), one_at_a_time()
    edge = await make_edge(first, second)
    answers = [asyncio.create_task(edge.chat(seed=n)) for n in range(4)]
    await edge.until(lambda: len(first.submits) == len(second.submits) == 2)
    second.step()  # begins one; the other is in line

    while first.num_running or not second.released_ids:
        first.step()
        await asyncio.sleep(0.001)
    await step_until([first, second], answers)

    assert [(await answer).status_code for answer in answers] == [200] * 4
    assert len(first.submits) == 3
    assert edge.replica_set.moves.counts == {("room", "moved"): 1}


async def test_choices_of_a_request_move_one_by_one_and_all_are_answered(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge, num_requests=1, n=3)

    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: bool(new.submits))
    await step_until([busy, new], answers)

    (body,) = [(await answer).json() for answer in answers]
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXT] * 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


async def test_a_stream_that_waits_moves_without_its_client_noticing(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge, num_requests=2, stream=True)

    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: bool(new.submits))
    await step_until([busy, new], answers)

    for answer in answers:
        events = [line[6:] for line in (await answer).text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"] for line in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == TEXT


async def test_the_explanation_tells_of_the_move_and_its_gain(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge, num_requests=1)
    body = {"model": "tiny", "prompt": "explained", "max_tokens": 3}
    asked = asyncio.create_task(
        edge.client.post("/v1/completions", json=body, headers={"X-Shoal-Explain": "1"})
    )
    await edge.until(lambda: len(busy.submits) == 2)

    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: len(new.submits) == 1)
    await step_until([busy, new], [*answers, asked])

    told = (await asked).json()["shoal"]["choices"][0]
    first, second = told["placements"]
    assert (first["replica"], second["replica"]) == ("replica-0", "new")
    assert (first["moved"], first["lost"]) == (None, None)
    assert second["moved"]["reason"] == "joined"
    assert second["moved"]["gain_s"] > 0
    assert [one["replica"] for one in second["candidates"]] == ["new", "replica-0"]
    assert told["queue_s"] >= second["after_s"] - first["after_s"]
    assert (told["num_moves"], told["num_migrations"]) == (1, 0)


async def test_a_client_that_leaves_while_its_request_moves_is_computed_for_nowhere(make_edge) -> None:
    edge, busy, new, answers = await make_hesitant_edge(make_edge)

    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)

    await edge.until(lambda: busy.num_running == 0)
    busy.give_back()
    assert new.submits == []
    assert edge.replica_set.num_placed == edge.replica_set.moves.num_under_way == 0
    assert all(view.num_booked == 0 for view in edge.replica_set.open_views)


async def test_a_request_that_has_begun_meanwhile_stays(make_edge) -> None:
    edge, busy, new, answers = await make_hesitant_edge(make_edge)

    busy.seats = None
    busy.step()
    busy.give_back()
    await step_until([busy, new], answers)

    assert [(await answer).status_code for answer in answers] == [200] * 3
    assert edge.replica_set.moves.counts == {("joined", "kept"): 1}
    assert new.submits == []


async def test_a_new_replica_that_dies_amid_a_move_loses_nothing(make_edge) -> None:
    edge, busy, new, answers = await make_hesitant_edge(make_edge)

    await new.kill()
    await edge.until(lambda: len(edge.replica_set.open_views) == 1)
    busy.give_back()
    await step_until([busy], answers)

    assert edge.replica_set.moves.counts == {("joined", "target_gone"): 1}
    told = [
        (await edge.client.get(f"/v1/shoal/requests/{(await answer).headers['x-request-id']}")).json()
        for answer in answers
    ]
    lost = [placement["lost"] for one in told for placement in one["choices"][0]["placements"]]
    assert sorted(lost, key=str) == sorted([None, None, None, Loss.TARGET_GONE.value], key=str)

    assert [(await answer).json()["choices"][0]["message"]["content"] for answer in answers] == [TEXT] * 3


async def test_an_old_replica_that_dies_amid_a_move_loses_nothing(make_edge) -> None:
    edge, busy, new, answers = await make_hesitant_edge(make_edge)

    await busy.kill()
    await step_until([new], answers)

    assert edge.replica_set.moves.counts == {("joined", "ended"): 1}

    assert [(await answer).json()["choices"][0]["message"]["content"] for answer in answers] == [TEXT] * 3


async def test_the_queue_of_a_draining_replica_goes_elsewhere(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge, num_requests=2)
    edge.membership.publish("", members(busy, new))
    busy.drain(60.0)

    await edge.until(lambda: bool(new.submits))
    await step_until([busy, new], answers)

    assert [(await answer).status_code for answer in answers] == [200] * 2


async def test_where_the_policy_puts_requests_by_rule_they_stay(make_edge) -> None:
    edge, busy, new, answers = await make_busy_edge(make_edge, policy="round-robin")
    edge.membership.publish("", members(busy, new))
    await edge.until(lambda: len(edge.replica_set.open_views) == 2)

    await step_until([busy, new], answers)

    assert new.submits == []
