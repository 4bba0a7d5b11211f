"""Beam searches over HTTP: one request to the engine, whose outputs are the choices, the likeliest first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.wire import request_from_wire
from router.scripted_replica import ScriptedReplica
from workers.engine.request import BeamParams


def says(text: str):
    return lambda submit: list(text.encode())


def beams_of(edge: Any) -> list[BeamParams | None]:
    return [request_from_wire(submit, "r").params.beams for submit in edge.replica.submits]


async def test_the_likeliest_outputs_come_first_as_choices(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ab")))

    answer = (await edge.complete(use_beam_search=True, n=3, max_tokens=4)).json()

    assert [(one["index"], one["text"], one["finish_reason"]) for one in answer["choices"]] == [
        (0, "ab", "stop"),
        (1, "abb", "stop"),
        (2, "abbb", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 3 + 4 + 4
    assert beams_of(edge) == [BeamParams(3, 1.0, None)]


async def test_a_chat_searches_for_its_next_message(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("wörld")))

    answer = (await edge.chat(use_beam_search=True, n=2, max_tokens=20)).json()

    assert [one["message"]["content"] for one in answer["choices"]] == ["wörld", "wörldd"]
    assert [one["finish_reason"] for one in answer["choices"]] == ["stop", "stop"]


async def test_each_prompt_has_a_search_of_its_own(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=lambda submit: list(submit.prompt_token_ids)))

    answer = (
        await edge.complete(prompt=["a", "b"], use_beam_search=True, n=2, max_tokens=9, echo=True)
    ).json()

    assert [one["text"] for one in answer["choices"]] == ["aa", "aaa", "bb", "bbb"]
    assert len(edge.replica.submits) == 2


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"n": 2, "best_of": 5}, BeamParams(5, early_stopping=None)),
        ({"n": 2, "length_penalty": 0.5}, BeamParams(2, 0.5, None)),
        ({"early_stopping": True}, BeamParams(1, 1.0, True)),
        ({"early_stopping": False}, BeamParams(1, 1.0, False)),
        ({"early_stopping": "never"}, BeamParams(1, early_stopping=None)),
    ],
    ids=str,
)
async def test_a_search_is_told_how_wide_it_is_and_when_it_ends(
    make_edge, fields: dict[str, Any], params: BeamParams
) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ab")))

    answer = await edge.complete(use_beam_search=True, max_tokens=9, **fields)

    assert len(answer.json()["choices"]) == fields.get("n", 1)
    assert beams_of(edge) == [params]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"use_beam_search": True, "bad_words": ["a"]}, "bad_words"),
        ({"use_beam_search": True, "guided_regex": "a+"}, "guided_regex"),
        ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True, "n": 51}, "n"),
        ({"use_beam_search": True, "best_of": 51}, "best_of"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "length_penalty": 41}, "length_penalty"),
    ],
    ids=str,
)
async def test_what_makes_no_search_is_refused_by_name(make_edge, fields: dict[str, Any], param: str) -> None:
    edge = await make_edge()

    for answer in (await edge.complete(**fields), await edge.chat(**fields)):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"].split(".")[0]) == (400, param)


@pytest.mark.parametrize(("fields", "param"), [({"n": 9}, "n"), ({"best_of": 9}, "best_of")])
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_a_search_wider_than_the_engine_is_refused_by_the_field_that_asked(
    make_edge, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    asked = asyncio.create_task(getattr(edge, endpoint)(use_beam_search=True, max_tokens=5, **fields))
    await edge.until(lambda: bool(edge.replica.submits))

    edge.replica.refuse(edge.replica.submits[0].request_id, "max_num_seqs is 8", "beam_width")

    answer = await asked
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_search_whose_replica_is_lost_begins_anew_elsewhere(make_edge) -> None:
    first, second = ScriptedReplica(step_s=None, script=says("ab")), ScriptedReplica(script=says("ab"))
    second.host = first.host
    edge = await make_edge(first, second)
    asked = asyncio.create_task(edge.complete(use_beam_search=True, n=2, max_tokens=9))
    await edge.until(lambda: bool(first.submits or second.submits))
    if first.submits:
        await first.kill()

    answer = (await asked).json()

    assert [one["text"] for one in answer["choices"]] == ["ab", "abb"]


async def test_a_search_that_nobody_waits_for_is_cancelled(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    asked = asyncio.create_task(edge.complete(use_beam_search=True, n=4, max_tokens=9))
    await edge.until(lambda: bool(edge.replica.submits))

    asked.cancel()
    await edge.replica.until(lambda: bool(edge.replica.cancelled_ids))

    assert edge.replica.cancelled_ids == [edge.replica.submits[0].request_id]


async def test_the_best_of_a_chat_are_given(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ab")))

    answer = (await edge.chat(best_of=4, n=2, max_tokens=9)).json()

    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [one["logprobs"] for one in answer["choices"]] == [None, None]
    assert len(edge.replica.submits) == 4


async def test_the_engine_searches_as_the_edge_is_told(make_edge, engine_replica, byte_vocabulary) -> None:
    replica = engine_replica.EngineReplica(byte_vocabulary)
    edge = await make_edge(replica)

    async def search(**fields: Any) -> list[str]:
        asked = asyncio.create_task(edge.complete(use_beam_search=True, max_tokens=5, **fields))
        await edge.until(lambda: replica.engine.has_work or asked.done())
        await replica.run()
        answer = (await asked).json()
        assert "choices" in answer, answer
        return [choice["text"] for choice in answer["choices"]]

    three = await search(n=3)

    assert len(set(three)) == 3
    assert await search(n=3) == three
    assert await search(n=1, best_of=3) == three[:1]
