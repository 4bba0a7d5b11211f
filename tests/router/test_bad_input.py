"""Everything that can be wrong with a request has a clear answer, and OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.config import Limits
from router.scripted_replica import ScriptedReplica

CALL = {"function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
USER = [{"role": "user", "content": "hello"}]


def error_of(response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"model": 3}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["a", "a" * 2000]}, "stop[1]"),
    ({"stop": [3]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [3, 999]}, "stop_token_ids[1]"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"reasoning_effort": "much"}, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"messages": [{**USER[0], "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER[0], "reasoning_content": "a"}]}, "messages[0].reasoning_content"),
    ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a" * 2000]}, "bad_words[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [999]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"magic": 1}, "magic"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_named(make_edge, fields: dict[str, Any], param: str) -> None:
    edge = await make_edge()

    response = await edge.chat(**fields)

    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*USER, {"role": "tool", "content": "a", "tool_call_id": "of a call that was cut off"}]},
        {"messages": [{**USER[0], "tool_call_id": None, "reasoning_content": ""}]},
        {"chat_template_kwargs": {"reasoning_effort": "much"}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"},
        {"guided_json": {"type": "integer"}, "guided_whitespace_pattern": " "},
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_clients_send_without_harm_is_taken(make_edge, fields: dict[str, Any]) -> None:
    edge = await make_edge(ScriptedReplica())

    assert (await edge.chat(**fields, max_tokens=1)).status_code == 200


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1, 258]}, "prompt[1]"),
    ({"prompt": [2**70]}, "prompt[0]"),
    ({"prompt": [[1], [2, 258]]}, "prompt[1][1]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", "a" * 5000]}, "prompt[1]"),
    ({"prompt": [[1], [1] * 5000]}, "prompt[1]"),
    ({"prompt": "a" * 5000}, "prompt"),
    ({"prompt": ["a"] * 200}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 10**9}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"suffix": "end"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_of_a_completion_is_named(make_edge, fields: dict[str, Any], param: str) -> None:
    edge = await make_edge()

    response = await edge.complete(**fields)

    assert (response.status_code, error_of(response)["param"]) == (400, param)


SAID: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"model": None}, "model", "model: field required"),
    ("chat/completions", {"messages": None}, "messages", "messages: field required"),
    ("completions", {"prompt": None}, "prompt", "prompt: field required"),
    ("embeddings", {"input": None}, "input", "input: field required"),
    ("responses", {"input": None}, "input", "input: field required"),
    ("chat/completions", {"messages": [None]}, "messages[0]", "messages[0]: must not be null"),
    (
        "chat/completions",
        {"messages": [{"role": None}]},
        "messages[0].role",
        "messages[0].role: must not be null",
    ),
    ("completions", {"prompt": [1.5]}, "prompt[0]", "valid integer"),
    ("completions", {"prompt": [True]}, "prompt[0]", "valid integer"),
    ("completions", {"prompt": [[1.5]]}, "prompt[0][0]", "valid integer"),
    ("embeddings", {"input": [1.5]}, "input[0]", "valid integer"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "b"}}},
        "response_format.json_schema.schema",
        "must be a JSON schema: an object, or true or false",
    ),
    ("chat/completions", {"guided_json": 7}, "guided_json", "an object, true or false, or its text"),
    (
        "chat/completions",
        {"structured_outputs": {"json": [1]}},
        "structured_outputs.json",
        "must be a JSON schema: an object, true or false, or its text",
    ),
    ("chat/completions", {"guided_json": False}, "guided_json", "nothing can match the schema false"),
    ("chat/completions", {"early_stopping": 3}, "early_stopping", 'must be true, false or "never"'),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
        "response_format",
        "nothing can match the schema false",
    ),
    (
        "chat/completions",
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "type: field required",
    ),
    (
        "responses",
        {"input": [{"type": "reasoning", "summary": []}]},
        "input",
        "input: list should have at least 1",
    ),
    ("completions", {"prompt": "a", "model": "m" * 100_000}, "model", "'mmm"),
    ("chat/completions", {"functions": []}, "functions", "use tools and tool_choice"),
    ("chat/completions", {"function_call": {}}, "function_call", "use tools and tool_choice"),
    ("chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort", "'xhigh' or 'max'"),
    ("responses", {"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "'xhigh' or 'max'"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), SAID, ids=lambda value: str(value)[:50])
async def test_what_is_wrong_is_said_in_the_words_of_the_api(
    make_edge, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    edge = await make_edge()
    messages = {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {}

    response = await edge.client.post(f"/v1/{path}", json={"model": "tiny", **messages, **fields})

    error = error_of(response)
    assert (response.status_code, error["param"]) == (404 if words == "'mmm" else 400, param)
    assert words in error["message"]
    assert len(error["message"]) < 600
    assert not [name for name in ("dict[", "bool", "list[") if name in error["message"]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}',
        b'{"model":' * 5000,
        b"[" * 100_000,
    ],
    ids=lambda body: str(body[:30]),
)
async def test_a_body_that_is_no_request_is_refused(make_edge, body: bytes) -> None:
    edge = await make_edge()

    response = await edge.client.post("/v1/completions", content=body)

    assert response.status_code == 400
    assert error_of(response)["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
async def test_a_schema_that_holds_no_number_says_so(make_edge, number: str) -> None:
    edge = await make_edge()
    body = '{"model": "tiny", "prompt": "a", "guided_json": {"minimum": ' + number + "}}"

    response = await edge.client.post("/v1/completions", content=body)

    assert (response.status_code, error_of(response)["param"]) == (400, "guided_json")
    assert "NaN or Infinity" in error_of(response)["message"]


async def test_arguments_that_are_nested_without_end_are_their_callers_mistake(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    arguments = '{"a":' * 1000 + "1" + "}" * 1000
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}

    response = await edge.chat(messages=[{"role": "assistant", "tool_calls": [call]}, *USER])

    param = "messages[0].tool_calls[0].function.arguments"
    assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_too_long_a_prompt_is_refused_with_both_numbers(make_edge) -> None:
    edge = await make_edge(max_model_len=100)

    for prompt, length in (
        ("a" * 100, "100 tokens"),
        ([97] * 120, "120 tokens"),
        ("a" * 20_000, "2223 tokens"),
    ):
        response = await edge.complete(prompt=prompt)

        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert length in error["message"]
        assert "takes 100" in error["message"]


async def test_a_prompt_long_enough_for_a_thread_is_the_same_prompt(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), max_model_len=50_000)
    text = "word " * 4000

    await edge.complete(prompt=text, max_tokens=1)
    await edge.chat(messages=[{"role": "user", "content": text}], max_tokens=1)

    plain, chat = edge.replica.submits
    assert bytes(plain.prompt_token_ids) == text.encode()
    assert text.encode() in bytes(i % 256 for i in chat.prompt_token_ids)


async def test_prompt_and_output_must_fit_together(make_edge) -> None:
    edge = await make_edge(max_model_len=100)

    error = error_of(await edge.complete(prompt="a" * 90, max_tokens=11))

    assert "90 tokens" in error["message"]
    assert "101" in error["message"]
    assert "100" in error["message"]


async def test_an_unknown_model_is_404(make_edge) -> None:
    edge = await make_edge()

    for response in (
        await edge.chat(model="gpt-4"),
        await edge.complete(model=""),
        await edge.client.get("/v1/models/gpt-4"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert "(served: tiny, alias)" in error_of(response)["message"]


async def test_a_model_answers_to_all_of_its_names(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await edge.complete(model="alias", max_tokens=1)

    assert (response.status_code, response.json()["model"]) == (200, "alias")
    listed = (await edge.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "alias"]
    assert (await edge.client.get("/v1/models/alias")).json()["id"] == "alias"


async def test_unknown_routes_and_methods_have_error_objects(make_edge) -> None:
    edge = await make_edge()

    missing = await edge.client.get("/v2/nothing")
    wrong = await edge.client.get("/v1/chat/completions")

    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_url")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_too_large_a_body_is_413_declared_or_not(make_edge) -> None:
    edge = await make_edge(limits=Limits(max_body_bytes=1000))

    async def pieces():
        while True:  # without end
            yield b" " * 100

    declared = await edge.client.post("/v1/completions", content=b" " * 1001)
    far_over = await edge.client.post("/v1/completions", content=b" " * 100_000)
    streamed = await edge.client.post("/v1/completions", content=pieces())

    for response in (declared, far_over, streamed):
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "1000 bytes" in error_of(response)["message"]


async def test_ten_megabytes_are_too_many_by_default(make_edge) -> None:
    edge = await make_edge()

    response = await edge.chat(messages=[{"role": "user", "content": "a" * 10_000_000}])

    assert response.status_code == 413


async def test_full_queues_are_429_with_a_time_to_come_back(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), limits=Limits(max_waiting_per_replica=0))

    response = await edge.chat()

    assert (response.status_code, error_of(response)["code"]) == (429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_bug_is_an_error_object_without_details(make_edge, monkeypatch) -> None:
    import httpx

    edge = await make_edge()
    monkeypatch.setattr(edge.ingress, "model", None)
    transport = httpx.ASGITransport(edge.app, raise_app_exceptions=False)

    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        response = await client.post("/v1/completions", content=json.dumps({"model": "tiny", "prompt": "a"}))

    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error"


async def test_sixty_four_mixed_requests_are_each_answered(make_edge) -> None:
    import asyncio

    edge = await make_edge(ScriptedReplica(), ScriptedReplica())
    makers = [
        lambda: edge.chat(max_tokens=20),
        lambda: edge.chat(max_tokens=20, stream=True, n=2),
        lambda: edge.complete(prompt=["a", "b"], max_tokens=3),
        lambda: edge.complete(temperature=9),
        lambda: edge.chat(model="none"),
        lambda: edge.chat(max_tokens=10**6),
        lambda: edge.client.post("/v1/completions", content=b"{"),
        lambda: edge.client.get("/health"),
    ]

    responses = await asyncio.gather(*(makers[i % len(makers)]() for i in range(64)))

    assert [r.status_code for r in responses] == [200, 200, 200, 400, 404, 400, 400, 200] * 8
    assert edge.replica_set.num_placed == 0
