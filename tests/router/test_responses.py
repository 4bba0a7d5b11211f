"""The responses API: whole and streamed, as the official client reads it; nothing is stored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from router.openai import responses
from router.scripted_replica import ScriptedReplica


def says(text: str):
    return lambda submit: list(text.encode())


ASKED = {"role": "user", "content": "a"}
REFUSAL = {"type": "refusal", "refusal": "I cannot."}
EARLIER = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}


async def respond(edge: Any, **fields: Any):
    return await edge.client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_the_official_client_gets_an_answer(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("Hello, wörld")))
    async with openai.AsyncOpenAI(base_url=f"{await edge.listen()}/v1", api_key="none") as client:
        answer = await client.responses.create(
            model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"}
        )

    assert (answer.output_text, answer.status, answer.object) == ("Hello, wörld", "completed", "response")
    assert answer.metadata == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.output_tokens == 14  # its bytes, and the end
    prompt = bytes(i % 256 for i in edge.replica.submits[0].prompt_token_ids)
    assert b"system\nBe brief." in prompt
    assert b"user\nhi" in prompt


async def test_the_official_client_streams_what_it_gets_whole(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("Hello, wörld")))
    async with openai.AsyncOpenAI(base_url=f"{await edge.listen()}/v1", api_key="none") as client:
        whole = await client.responses.create(model="tiny", input="hi")
        async with client.responses.stream(model="tiny", input="hi") as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()

    assert "".join(pieces) == final.output_text == whole.output_text
    assert final.usage == whole.usage


async def test_a_stream_is_a_row_of_numbered_events_in_order(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("ab")))

    text = (await respond(edge, stream=True)).text

    events = events_of(text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "[DONE]" not in text


async def test_an_answer_that_is_cut_says_so(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("abcdef")))

    whole = (await respond(edge, max_output_tokens=3)).json()
    last = events_of((await respond(edge, max_output_tokens=3, stream=True)).text)[-1]

    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["type"] == "response.incomplete"


async def test_earlier_items_are_the_conversation(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "three"},
    ]

    await respond(edge, input=items, max_output_tokens=1)
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    await edge.chat(messages=messages, max_tokens=1)

    first, second = edge.replica.submits
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_long_conversation_loses_its_oldest_messages_where_that_is_allowed(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=60)
    items = [{"role": "user", "content": letter * 20} for letter in "abc"]

    refused = await respond(edge, input=items)
    cut = await respond(edge, input=items, truncation="auto", max_output_tokens=1)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert cut.status_code == 200
    prompt = bytes(i % 256 for i in edge.replica.submits[0].prompt_token_ids)
    assert b"c" * 20 in prompt
    assert b"aaa" not in prompt


async def test_no_more_messages_are_dropped_than_must_be_and_few_tries_find_that(
    make_edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=500)
    items = [{"role": "user", "content": f"{i:04d}"} for i in range(1000)]
    prepare = responses.prepare_chat
    tries = []

    def counted(*given):
        tries.append(given)
        return prepare(*given)

    monkeypatch.setattr(responses, "prepare_chat", counted)
    answer = await respond(edge, input=items, truncation="auto", max_output_tokens=1)

    assert answer.status_code == 200
    token_ids = edge.replica.submits[0].prompt_token_ids
    one_message = len("#user\n0000#\n")  # of the template, a control token for each #
    assert 500 - one_message <= len(token_ids) < 500
    assert bytes(i % 256 for i in token_ids).count(b"0999") == 1
    assert len(tries) <= 13


async def test_logprobs_come_where_included(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("a")))

    whole = (await respond(edge, include=["message.output_text.logprobs"], top_logprobs=2)).json()
    without = (await respond(edge)).json()

    entries = whole["output"][0]["content"][0]["logprobs"]
    assert entries[0]["token"] == "a"
    assert len(entries[0]["top_logprobs"]) == 2
    assert without["output"][0]["content"][0]["logprobs"] == []


async def test_an_error_after_the_stream_began_is_an_error_event(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None, script=says("abc")))
    answer = asyncio.create_task(respond(edge, stream=True))
    await edge.replica.until(lambda: bool(edge.replica.submits))
    edge.replica.step()
    edge.replica.refuse(edge.replica.submits[0].request_id, "no more", "input")

    events = events_of((await answer).text)
    assert (events[-1]["type"], events[-1]["message"]) == ("error", "no more")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "text", "schema": {"type": "integer"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "name": "a"}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": [ASKED, {**ASKED, "content": [REFUSAL]}]}, "input[1].content"),
        (
            {"input": [ASKED, EARLIER, {**EARLIER, "arguments": "[1]"}], "instructions": "a"},
            "input[2].arguments",
        ),
        ({"magic": 1}, "magic"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_a_wrong_field_is_named(make_edge, fields: dict[str, Any], param: str) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await respond(edge, **fields)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "messages" not in error["message"]


async def test_a_wrong_item_is_named_by_its_place_though_others_were_dropped(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=120)
    long = {"role": "user", "content": "a" * 60}
    items = [long, long, long, EARLIER, {**EARLIER, "arguments": "[1]"}, OUTPUT, ASKED]

    error = (await respond(edge, input=items, truncation="auto")).json()["error"]

    assert error["param"] == "input[4].arguments"
    assert error["message"].startswith("input[4].arguments: must be a JSON object")


async def test_parts_of_text_are_read_whatever_kind_of_text_they_are(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    items = [
        {"role": "user", "content": [{"type": "output_text", "text": "asked"}]},
        {"role": "assistant", "content": [{"type": "input_text", "text": "said"}]},
        ASKED,
    ]

    answer = await respond(edge, input=items, include=["reasoning.encrypted_content"], max_output_tokens=1)

    assert answer.status_code == 200, answer.text
    prompt = bytes(i % 256 for i in edge.replica.submits[0].prompt_token_ids)
    assert b"user\nasked" in prompt
    assert b"assistant\nsaid" in prompt


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_response_by_id_is_not_kept(make_edge, method: str) -> None:
    edge = await make_edge()

    response = await edge.client.request(method, "/v1/responses/resp_1")

    assert response.status_code == 404
    assert "not stored" in response.json()["error"]["message"]


WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bonn", "Rome"]}},
        "required": ["city"],
    },
}
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
CALL = 'Well.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


async def test_a_call_is_an_item_of_its_own_streamed_or_not(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says(CALL)), served={"chat_template": TEMPLATE})
    async with openai.AsyncOpenAI(base_url=f"{await edge.listen()}/v1", api_key="none") as client:
        tools: Any = [WEATHER]
        whole = await client.responses.create(model="tiny", input="hi", tools=tools)
        async with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

    said, called = whole.output
    assert (said.type, called.type) == ("message", "function_call")
    assert whole.output_text == "Well."
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Bonn"})
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == called.arguments
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == called.arguments


async def test_calls_and_their_outputs_are_given_back(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"chat_template": TEMPLATE})
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]

    answer = await respond(edge, input=items, tools=[WEATHER], max_output_tokens=1)

    assert answer.status_code == 200, answer.text
    prompt = bytes(i for i in edge.replica.submits[0].prompt_token_ids if i < 256).decode()
    assert 'weather{"city": "Bonn"}' in prompt
    assert "tool:rain" in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_call_that_is_demanded_is_enforced(make_edge, choice: Any) -> None:
    edge = await make_edge(ScriptedReplica(), served={"chat_template": TEMPLATE})

    answer = await respond(edge, tools=[WEATHER], tool_choice=choice, max_output_tokens=1)

    assert answer.status_code == 200, answer.text
    assert "Bonn" in edge.replica.submits[0].params.grammar


async def test_a_schema_is_enforced(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    form = {"type": "json_schema", "name": "x", "schema": WEATHER["parameters"], "strict": True}

    answer = await respond(edge, text={"format": form}, max_output_tokens=1)

    assert answer.json()["text"]["format"] == form
    assert "Bonn" in edge.replica.submits[0].params.grammar


async def test_thinking_is_an_item_before_the_answer(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says("<think>Hm.</think>Yes.")), served={"reasoning_parser": "qwen3"}
    )

    whole = (await respond(edge)).json()
    kinds = [event["type"] for event in events_of((await respond(edge, stream=True)).text)]

    thought, said = whole["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Hm.")
    assert said["content"][0]["text"] == "Yes."
    assert "response.reasoning_text.delta" in kinds


async def test_effort_is_told_to_the_template(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"chat_template": "{{ reasoning_effort }}"})

    await respond(edge, reasoning={"effort": "high", "summary": "auto"}, max_output_tokens=1)

    assert bytes(edge.replica.submits[0].prompt_token_ids) == b"high"


async def test_the_official_client_counts_what_a_response_would_be_billed_for(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    fields: dict[str, Any] = {"model": "tiny", "input": "hi", "instructions": "Be brief.", "tools": tools}
    async with openai.AsyncOpenAI(base_url=f"{await edge.listen()}/v1", api_key="none") as client:
        counted = await client.responses.input_tokens.count(**fields)
        answer = await client.responses.create(**fields, max_output_tokens=1)

    assert counted.object == "response.input_tokens"
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(edge.replica.submits) == 1


async def test_an_earlier_refusal_is_text_of_the_assistants(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    said = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    asked = {"role": "user", "content": "a"}

    answer = await edge.client.post("/v1/responses", json={"model": "tiny", "input": [asked, said, asked]})

    assert answer.status_code == 200, answer.text
    assert b"I cannot." in bytes(i for i in edge.replica.submits[0].prompt_token_ids if i < 256)


async def test_parameters_that_are_no_object_are_named_as_they_were_given(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    tools = [{"type": "function", "name": "f", "parameters": {"enum": [5]}}]

    answer = await edge.client.post("/v1/responses", json={"model": "tiny", "input": "a", "tools": tools})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[0].parameters")
    assert error["message"].startswith("tools[0].parameters: allows no object")
