"""``/v1/chat/completions``: whole and streamed answers say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.scripted_replica import ScriptedReplica

END = 257


def says(text: str):
    return lambda submit: list(text.encode())


def events(text: str) -> list[dict[str, Any]]:
    """The objects of an event stream, which must end as it should."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_an_answer_has_the_models_words(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("Grüße 🐟")))

    answer = await edge.chat(max_tokens=50)

    body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße 🐟", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = b"\0user\nhello\0\n\0assistant\n"  # one token for each control token and byte
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == len("Grüße 🐟".encode()) + 1  # and the end of sequence
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_has_a_role_a_chunk_per_token_and_an_end(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says('a"b\n')))

    answer = await edge.chat(max_tokens=4, stream=True)

    chunks = events(answer.text)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": c} for c in 'a"b\n'), {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]


async def test_usage_comes_last_and_is_null_before(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("abc")))

    chunks = events((await edge.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})).text)

    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.text(alphabet="ab <é🐟", max_size=30),
    stops=st.lists(st.text(alphabet="ab <é", min_size=1, max_size=4), max_size=3),
    n=st.integers(1, 2),
)
async def test_streamed_text_equals_whole_text(make_edge, data: str, stops: list[str], n: int) -> None:
    edge = await make_edge(ScriptedReplica(script=says(data)))
    fields = {"n": n, "stop": stops, "max_tokens": 60, "seed": 1}

    whole = (await edge.chat(**fields)).json()
    streamed = events((await edge.chat(**fields, stream=True, stream_options={"include_usage": True})).text)

    texts, reasons = [""] * n, [None] * n
    for chunk in streamed[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert streamed[-1]["usage"] == whole["usage"]


async def test_a_stop_string_ends_the_request_and_later_tokens_are_not_billed(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("one STOP two")))

    body = (await edge.chat(stop=["STOP"], max_tokens=12)).json()

    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "STOP"
    assert body["usage"]["completion_tokens"] == len("one STOP")
    await edge.replica.until(lambda: edge.replica.num_running == 0)


async def test_a_stop_string_may_be_kept_in_the_text(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("one STOP two")))

    body = (await edge.chat(stop="STOP", include_stop_str_in_output=True)).json()

    assert body["choices"][0]["message"]["content"] == "one STOP"


async def test_no_stop_string_ends_it_before_min_tokens(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ab ab ab")))

    body = (await edge.chat(stop="b", min_tokens=4, max_tokens=8)).json()

    assert body["choices"][0]["message"]["content"] == "ab a"


async def test_a_stop_token_ends_it_without_its_text(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("abcd")))

    choice = (await edge.chat(stop_token_ids=[ord("c")], max_tokens=9)).json()["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "ab",
        "stop",
        99,
    )


async def test_special_tokens_show_where_asked_for(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=lambda submit: [97, 256, 98]))

    hidden = (await edge.chat(max_tokens=3)).json()["choices"][0]["message"]["content"]
    shown = (await edge.chat(max_tokens=3, skip_special_tokens=False)).json()["choices"][0]["message"][
        "content"
    ]

    assert (hidden, shown) == ("ab", "a<|start|>b")


async def test_logprobs_have_tokens_and_bytes(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("é!")))

    whole = (await edge.chat(max_tokens=3, logprobs=True, top_logprobs=2)).json()
    chunks = events((await edge.chat(max_tokens=3, logprobs=True, top_logprobs=2, stream=True)).text)

    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x21]]
    assert entries[2] == {
        "token": "!",
        "logprob": -0.5,
        "bytes": [33],
        "top_logprobs": [
            {"token": "!", "logprob": -0.5, "bytes": [33]},
            {"token": '"', "logprob": -1.5, "bytes": [34]},
        ],
    }
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == entries


async def test_contents_in_parts_and_developer_messages_reach_the_template(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    answer = await edge.chat(
        messages=[{"role": "developer", "content": "rule"}, {"role": "user", "content": parts}]
    )

    assert answer.status_code == 200
    sent = bytes(i if i < 256 else 0 for i in edge.replica.submits[0].prompt_token_ids)
    assert sent == b"\0system\nrule\0\n\0user\none two\0\n\0assistant\n"


async def test_an_answer_may_be_given_back_as_the_client_dumps_it(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")))
    said = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}

    answer = await edge.chat(
        messages=[{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}],
        user="me",
        store=False,
        metadata={"a": "b"},
        seed=None,
        temperature=None,
    )

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot."}]},
        {"content": "I ", "refusal": "cannot."},
    ],
)
async def test_an_earlier_refusal_is_text_of_the_assistants(make_edge, said: dict[str, Any]) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")))
    asked = {"role": "user", "content": "a"}

    answer = await edge.chat(messages=[asked, {"role": "assistant", **said}, asked])
    by_user = await edge.chat(messages=[{"role": "user", **said}])

    assert answer.status_code == 200, answer.text
    sent = bytes(i if i < 256 else 0 for i in edge.replica.submits[0].prompt_token_ids)
    assert b"\0assistant\nI cannot.\0\n" in sent
    assert by_user.status_code == 400
    assert "only an assistant refuses" in by_user.json()["error"]["message"]


@pytest.mark.parametrize(("asked", "sent"), [(-1, 2**64 - 1), (0, 0), (2**63, 2**63)])
async def test_a_seed_is_kept(make_edge, asked: int, sent: int) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")))

    await edge.chat(seed=asked)

    assert edge.replica.submits[0].params.seed == sent


async def test_without_max_tokens_an_answer_may_fill_the_context(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ok")), max_model_len=100)

    await edge.chat()

    (submit,) = edge.replica.submits
    assert len(submit.prompt_token_ids) + submit.params.max_tokens == 100


async def test_a_refusal_by_the_engine_is_the_callers_error(make_edge) -> None:
    import asyncio

    edge = await make_edge(ScriptedReplica(step_s=None))
    answer = asyncio.create_task(edge.chat(stream=True))
    await edge.replica.until(lambda: bool(edge.replica.submits))

    edge.replica.refuse(edge.replica.submits[0].request_id, "prompt has 9 blocks, the pool 4", "messages")

    response = await answer
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt has 9 blocks, the pool 4"
    assert response.json()["error"]["param"] == "messages"
