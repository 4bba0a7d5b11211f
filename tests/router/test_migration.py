"""Requests whose replica dies or stalls go on elsewhere: no token lost, repeated or drawn anew."""

from __future__ import annotations

import asyncio
import json

from router.config import Limits, Timeouts
from router.scripted_replica import ScriptedReplica

LONG = 40


def letters(submit) -> list[int]:
    """Letters that depend on seed, choice and position, as sampled tokens do."""
    params = submit.params
    return [97 + (params.seed + params.choice_index * 5 + i * i) % 26 for i in range(params.max_tokens)]


def by_hand() -> ScriptedReplica:
    return ScriptedReplica(step_s=None, script=letters)


async def where(edge, num_submits: int = 1) -> tuple[ScriptedReplica, ScriptedReplica]:
    """The replica that has all requests, and the other."""
    first, second = edge.replicas
    await edge.until(lambda: max(len(first.submits), len(second.submits)) == num_submits)
    return (first, second) if first.submits else (second, first)


async def until_answered(edge) -> None:
    """Until a first output of each request has come."""
    await edge.until(lambda: all(view.num_booked == 0 for view in edge.replica_set.open_views))


async def test_a_killed_replica_does_not_show_in_the_text(make_edge) -> None:
    edge = await make_edge(by_hand(), by_hand())
    expected = bytes(97 + (11 + i * i) % 26 for i in range(LONG)).decode()
    answer = asyncio.create_task(edge.chat(seed=11, max_tokens=LONG))
    busy, idle = await where(edge)
    for _ in range(7):
        busy.step()
    await until_answered(edge)

    await busy.kill()
    await idle.until(lambda: bool(idle.submits))
    for _ in range(LONG):
        idle.step()
    body = (await answer).json()

    assert body["choices"][0]["message"]["content"] == expected
    assert body["usage"]["completion_tokens"] == LONG
    (resumed,), (first,) = idle.submits, busy.submits
    assert 0 < len(resumed.output_token_ids) <= 7
    assert resumed.params == first.params
    assert resumed.prompt_token_ids == first.prompt_token_ids
    assert resumed.request_id != first.request_id
    assert edge.replica_set.counts.num_resumed == 1


async def test_all_choices_go_on_with_their_own_random_numbers(make_edge) -> None:
    edge = await make_edge(by_hand(), by_hand())
    answer = asyncio.create_task(edge.complete(prompt="x" * 320, seed=3, max_tokens=LONG, n=3))
    busy, idle = await where(edge, 3)
    for _ in range(5):
        busy.step()
    await until_answered(edge)

    await busy.kill()
    await edge.until(lambda: len(idle.submits) == 3)
    for _ in range(LONG):
        idle.step()
    choices = (await answer).json()["choices"]

    for index, choice in enumerate(choices):
        assert choice["text"] == bytes(97 + (3 + index * 5 + i * i) % 26 for i in range(LONG)).decode()


async def test_a_stalled_replica_does_not_show_in_a_stream(make_edge) -> None:
    edge = await make_edge(by_hand(), by_hand(), timeouts=Timeouts(stall_s=0.2))
    answer = asyncio.create_task(edge.chat(seed=11, max_tokens=LONG, stream=True, logprobs=True))
    busy, idle = await where(edge)
    busy.step()

    await idle.until(lambda: bool(idle.submits))
    for _ in range(LONG):
        idle.step()
    lines = (await answer).text.split("\n\n")

    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0] for chunk in chunks]
    text = "".join(delta["delta"].get("content", "") for delta in deltas)
    assert text == bytes(97 + (11 + i * i) % 26 for i in range(LONG)).decode()
    assert sum(len(delta["logprobs"]["content"]) for delta in deltas if delta["logprobs"]) == LONG
    assert lines[-2] == "data: [DONE]"


async def test_a_character_cut_in_two_by_a_loss_is_whole(make_edge) -> None:
    fish = list("🐟".encode()) * 2
    edge = await make_edge(*(ScriptedReplica(step_s=None, script=lambda submit: fish) for _ in range(2)))
    answer = asyncio.create_task(edge.chat(max_tokens=8))
    busy, idle = await where(edge)
    busy.step()
    busy.step()
    await until_answered(edge)

    await busy.kill()
    await idle.until(lambda: bool(idle.submits))
    for _ in range(8):
        idle.step()

    assert (await answer).json()["choices"][0]["message"]["content"] == "🐟🐟"


async def test_a_stop_string_is_found_across_a_loss(make_edge) -> None:
    text = list(b"abcdef END more")
    edge = await make_edge(*(ScriptedReplica(step_s=None, script=lambda submit: text) for _ in range(2)))
    answer = asyncio.create_task(edge.chat(max_tokens=15, stop="END"))
    busy, idle = await where(edge)
    for _ in range(8):  # up to "E"
        busy.step()
    await until_answered(edge)

    await busy.kill()
    await idle.until(lambda: bool(idle.submits))
    for _ in range(15):
        idle.step()
    choice = (await answer).json()["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("abcdef ", "stop")
    await idle.until(lambda: bool(idle.cancelled_ids) or idle.num_running == 0)


async def test_a_request_waits_for_a_replica_to_come(make_edge) -> None:
    replica = by_hand()
    edge = await make_edge(replica)
    await replica.kill()
    await edge.until(lambda: not edge.replica_set.open_views)
    answer = asyncio.create_task(edge.chat(max_tokens=2))

    await replica.start()
    await replica.until(lambda: bool(replica.submits))
    replica.step()
    replica.step()

    assert (await answer).status_code == 200


async def test_without_any_replica_the_answer_is_503(make_edge) -> None:
    edge = await make_edge(timeouts=Timeouts(replica_wait_s=0.05))

    answer = await edge.chat()

    assert answer.status_code == 503
    assert answer.json()["error"] == {
        "message": "no replica of the model has been available for 0.05 s",
        "type": "server_error",
        "param": None,
        "code": "no_replica",
    }


async def test_a_stream_whose_replicas_are_all_lost_ends_in_an_error_event(make_edge) -> None:
    replica = by_hand()
    edge = await make_edge(replica, limits=Limits(max_lost_replicas=1))
    answer = asyncio.create_task(edge.chat(max_tokens=LONG, stream=True))
    await replica.until(lambda: bool(replica.submits))
    replica.step()
    await until_answered(edge)

    await replica.kill()
    events = (await answer).text.split("\n\n")

    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "no_replica"
    assert "[DONE]" not in events[-2]


async def test_what_a_drained_replica_cuts_off_goes_on_elsewhere(make_edge) -> None:
    edge = await make_edge(by_hand(), by_hand())
    answer = asyncio.create_task(edge.chat(seed=11, max_tokens=4))
    busy, idle = await where(edge)
    busy.step()
    busy.drain(0.0)
    busy.abort_all()

    await idle.until(lambda: bool(idle.submits))
    for _ in range(4):
        idle.step()

    text = (await answer).json()["choices"][0]["message"]["content"]
    assert text == bytes(97 + (11 + i * i) % 26 for i in range(4)).decode()


async def test_a_drain_that_ends_the_stream_is_not_held_against_its_requests(make_edge) -> None:
    edge = await make_edge(by_hand(), by_hand(), limits=Limits(max_lost_replicas=1))
    answer = asyncio.create_task(edge.chat(seed=11, max_tokens=4))
    busy, idle = await where(edge)
    busy.drain(0.0)
    await edge.until(lambda: len(edge.replica_set.open_views) == 1)

    await busy.kill()
    await idle.until(lambda: bool(idle.submits))
    for _ in range(4):
        idle.step()

    assert (await answer).status_code == 200
