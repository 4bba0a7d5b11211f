"""Long texts: tokenized without holding up anyone, and refused where their length could mean anything."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from router.config import Limits
from router.scripted_replica import ScriptedReplica
from router.tenancy.keys import parse_keys
from router.text.literals import longest_of
from router.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from router.tokenizing import VERY_LONG_TEXT_CHARS
from tests.router.loop_turns import longest_turn_s
from workers.checkpoint.vocabulary import Vocabulary

SHORT = Limits(max_unbounded_chars=100)


@pytest.mark.parametrize("text", [" " * 1_000_000, "word, " * 160_000])
async def test_the_loop_runs_on_while_six_long_texts_are_tokenized(make_edge, text: str) -> None:
    edge = await make_edge()
    bodies = [{"prompt": text}] * 3 + [{"prompt": text, "return_token_strs": True}] * 3
    asked = asyncio.gather(*(edge.client.post("/tokenize", json=body) for body in bodies))

    turn_s = await longest_turn_s(asked)

    assert [answer.json()["count"] for answer in await asked] == [len(text)] * 6
    assert turn_s < 0.5


@pytest.mark.parametrize("num_chars", [LONG_TEXT_CHARS - 1, LONG_TEXT_CHARS, VERY_LONG_TEXT_CHARS])
def test_a_text_has_the_same_tokens_however_it_is_tokenized(
    byte_vocabulary: Vocabulary, num_chars: int
) -> None:
    tokenizer = Tokenizer(byte_vocabulary)
    text = ("a<|start|>é " * num_chars)[:num_chars]

    assert tokenizer.encode(text) == [
        token_id
        for start in range(0, num_chars, 1200)
        for token_id in tokenizer.encode(text[start : start + 1200])
    ]
    assert tokenizer.encode_literally(text) == list(text.encode())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a" * 101}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 101}]}, "messages"),
        ("/v1/completions", {"prompt": "a" * 101, "truncate_prompt_tokens": 3}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a" * 101], "truncate_prompt_tokens": 3}, "prompt[1]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 101}], "truncate_prompt_tokens": 3},
            "messages",
        ),
        ("/detokenize", {"tokens": [9] * 101}, "tokens"),
        ("/v1/completions", {"prompt": [9] * 101, "truncate_prompt_tokens": 3}, "prompt"),
        ("/v1/embeddings", {"input": [9] * 101, "truncate_prompt_tokens": 3}, "input"),
        ("/v1/embeddings", {"input": "a" * 101, "truncate_prompt_tokens": 3}, "input"),
    ],
)
async def test_a_text_too_long_to_be_only_tokenized_or_truncated_is_refused(
    make_edge, path: str, body: dict[str, Any], param: str
) -> None:
    edge = await make_edge(ScriptedReplica(), limits=SHORT)

    answer = await edge.client.post(path, json={"model": "tiny", **body})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "the limit is 100" in error["message"]


USER = {"role": "user", "content": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def shown(length: int) -> dict[str, dict[str, Any]]:
    """Bodies that hold ``length`` characters in one field, by the name of that; ``SHOWS_ALL`` shows each."""
    text = "a" * length
    function = {**CALL["function"], "arguments": f'{{"a": "{text}"}}'}
    called = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    named = {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "name": text}}]}
    numbered = {"role": "assistant", "tool_calls": [{**CALL, "id": text}]}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    properties = {"type": "object", "properties": {text: {"type": "string"}}}
    return {
        "content": {"messages": [{**USER, "content": text}]},
        "parts": {"messages": [{**USER, "content": [{"type": "text", "text": text}]}]},
        "refusal": {"messages": [USER, {"role": "assistant", "refusal": text}]},
        "arguments": {"messages": [USER, called]},
        "name of a call": {"messages": [USER, named]},
        "id of a call": {"messages": [USER, numbered]},
        "reasoning": {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": text}]},
        "name": {"messages": [{**USER, "name": text}]},
        "result": {"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": text}]},
        "id of a result": {"messages": [USER, {"role": "tool", "tool_call_id": text, "content": "a"}]},
        "tool": {"messages": [USER], "tools": [tool]},
        "parameters": {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": properties}}],
        },
        "kwargs": {"messages": [USER], "chat_template_kwargs": {"a": [text]}},
    }


SHOWS_ALL = "{{ messages | tojson }}{{ tools | tojson }}{{ a }}"


@pytest.mark.parametrize("field", shown(0))
async def test_whatever_field_a_template_shows_counts(make_edge, field: str) -> None:
    limits, served = Limits(max_unbounded_chars=1000), {"chat_template": SHOWS_ALL}
    edge = await make_edge(ScriptedReplica(), limits=limits, served=served)

    for path in ("/tokenize", "/v1/chat/completions"):
        cut = {"truncate_prompt_tokens": 3, "max_tokens": 1} if path != "/tokenize" else {}
        short, long = [
            await edge.client.post(path, json={"model": "tiny", **cut, **shown(length)[field]})
            for length in (60, 1001)
        ]

        assert short.status_code == 200, short.text
        assert (long.status_code, long.json()["error"]["param"]) == (400, "messages")
        assert "the limit is 1000" in long.json()["error"]["message"]


async def test_what_a_template_makes_of_little_is_bounded_too(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), limits=Limits(max_unbounded_chars=1000))
    messages = [{"role": "user", "content": ""}] * 60  # 4 characters each, of which the template makes 20

    answer = await edge.client.post("/tokenize", json={"model": "tiny", "messages": messages})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("field", ["arguments", "reasoning", "id of a call", "tool"])
async def test_the_loop_runs_on_while_a_long_conversation_is_tokenized(make_edge, field: str) -> None:
    edge = await make_edge(served={"chat_template": SHOWS_ALL})
    body = {"model": "tiny", **shown(990_000)[field]}
    asked = asyncio.ensure_future(edge.client.post("/tokenize", json=body))

    turn_s = await longest_turn_s(asked)

    assert (await asked).status_code == 200
    assert turn_s < 0.5, turn_s


async def test_the_loop_runs_on_while_many_items_are_understood(make_edge) -> None:
    edge = await make_edge()
    body = {"model": "tiny", "input": [{"role": "user", "content": "aaaaaaaaaaaaaaaa"}] * 19_000}
    asked = asyncio.ensure_future(edge.client.post("/v1/responses/input_tokens", json=body))

    turn_s = await longest_turn_s(asked)

    assert (await asked).status_code == 400
    assert turn_s < 0.5, turn_s


async def test_arguments_of_a_call_hold_no_more_objects_than_a_body(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    arguments = '{"a": [' + ",".join(["[]"] * 20_001) + "]}"
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}

    answer = await edge.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1].tool_calls[0].function.arguments")
    assert "20000" in error["message"]


async def test_a_prompt_that_the_model_bounds_may_be_longer(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), limits=SHORT)

    assert (await edge.complete(prompt="a" * 101, max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "a"}),
    ],
)
async def test_counting_tokens_is_counted_among_the_requests_of_a_key(
    make_edge, path: str, body: dict[str, Any]
) -> None:
    keys = parse_keys("keys: [{name: one, key: sk-0123456789012345, requests_per_minute: 2}]")
    edge = await make_edge(keys=keys)
    headers = {"authorization": "Bearer sk-0123456789012345"}

    answers = [await edge.client.post(path, json=body, headers=headers) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"]
    assert edge.ingress.gate.num_running == 0


@pytest.mark.parametrize("unit", ["<", "<unused", "<unused1", "<unused59", "[", "</"])
def test_control_tokens_are_found_in_time_that_does_not_grow_with_their_number(unit: str) -> None:
    pattern = longest_of([*(f"<unused{i}>" for i in range(6000)), "<pad>", "[multimodal]", "</s>"])
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()

    assert pattern.sub("", text) == text
    assert time.process_time() - start < 1.0


def test_the_longest_name_is_found() -> None:
    pattern = longest_of(["<a", "<a>b", "<a>", "", "(x", "(y"])

    assert pattern.findall("<a>b<a><a<(x(y(") == ["<a>b", "<a>", "<a", "(x", "(y"]
    assert longest_of([""]).findall("text") == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model": "tiny", "prompt": [9' + b",9" * 2_000_000 + b"]}"),
        ("/detokenize", b'{"tokens": [9' + b",9" * 2_000_000 + b"]}"),
        ("/v1/completions", b'{"model": "tiny", "prompt": "' + b'\\"' * 2_000_000),
    ],
)
async def test_the_loop_runs_on_while_six_long_bodies_are_read(make_edge, path: str, body: bytes) -> None:
    edge = await make_edge()
    asked = asyncio.gather(*(edge.client.post(path, content=body) for _ in range(6)))

    turn_s = await longest_turn_s(asked)

    assert [answer.status_code for answer in await asked] == [400] * 6
    assert turn_s < 0.5, turn_s
