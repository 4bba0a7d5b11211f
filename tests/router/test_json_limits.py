"""Which part of a body an error names: always a path of the body as it came, also where its JSON goes too far."""

from __future__ import annotations

import gzip
import json
import re
import time
from typing import Any

import pytest
from pydantic_core import from_json

from router.openai.embeddings import EmbeddingBody
from router.openai.json_limits import invalid_json
from router.openai.responses_schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokenize import DetokenizeBody, TokenizeBody
from router.scripted_replica import ScriptedReplica

USER = [{"role": "user", "content": "a"}]
BODIES: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", ChatBody, {"messages": USER, "max_tokens": 1}),
    ("/v1/completions", CompletionBody, {"prompt": "a", "max_tokens": 1}),
    ("/v1/responses", ResponsesBody, {"input": "a", "max_output_tokens": 1}),
    ("/v1/embeddings", EmbeddingBody, {"input": "a"}),
    ("/tokenize", TokenizeBody, {"prompt": "a"}),
    ("/detokenize", DetokenizeBody, {"tokens": [97]}),
]
WRONG: list[Any] = [
    3,
    -1.5,
    "x",
    True,
    [],
    {},
    [3],
    [[]],
    [["x"]],
    [{}],
    {"x": 1},
    {"<one>": {}},
    [{"type": []}],
]
"""Of each a field is one sort or the other; none is right everywhere."""


def holds(body: Any, path: str) -> bool:
    """True if the body has the path, or lacks nothing but its last field."""
    parts = [int(place) if place else name for place, name in re.findall(r"\[(\d+)\]|([^.\[]+)", path)]
    for number, part in enumerate(parts, start=1):
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif isinstance(body, dict) and (part in body or number == len(parts)):
            body = body.get(part)
        else:
            return False
    return True


@pytest.mark.parametrize(("path", "model", "good"), BODIES, ids=lambda value: str(value)[:24])
async def test_an_error_names_a_path_of_the_body(
    make_edge, path: str, model: Any, good: dict[str, Any]
) -> None:
    edge = await make_edge(ScriptedReplica())
    names = [field.alias or name for name, field in model.model_fields.items()]
    num_refused = 0

    for name in names:
        for value in WRONG:
            body = {"model": "tiny", **good, name: value}
            answer = await edge.client.post(path, json=body)

            if answer.status_code in (200, 404):
                continue
            num_refused += 1
            error = answer.json()["error"]
            assert answer.status_code == 400, (body, error)
            assert error["param"] is not None, (body, error)
            assert holds(body, error["param"]), (body, error)

    assert num_refused > 5 * len(names)


TOO_MUCH: list[tuple[str, str, str]] = [
    ('"seed": ' + "9" * 5000, "seed", "5000 digits, the limit is 4300"),
    ('"metadata": {"a": [1, -' + "9" * 5000 + "]}", "metadata.a[1]", "5000 digits"),
    ('"metadata": {"a": ' + "[" * 300 + "]" * 300 + "}", "metadata", "nested more than 200 levels deep"),
    ('"guided_json": ' + '{"not": ' * 300 + "{}" + "}" * 300, "guided_json", "nested more than 200"),
    ('"user": "a\\ud800"', "user", "\\ud800, one half of a surrogate pair"),
    ('"stop": ["é", "\\ud83d\\ude00 \\ud83d x"]', "stop[1]", "\\ud83d, one half"),
    ('"x,y:[\\"": {"\\n{": "\\udc00"}', 'x,y:[\\".\\n{', "\\udc00, one half"),
    ('"logit_bias": {"' + "k" * 500 + '": "\\udc00"}', "logit_bias." + "k" * 80 + "…", "one half"),
]


@pytest.mark.parametrize(("field", "param", "words"), TOO_MUCH, ids=[words for *_, words in TOO_MUCH])
async def test_json_that_goes_too_far_is_not_called_invalid(
    make_edge, field: str, param: str, words: str
) -> None:
    edge = await make_edge()
    body = '{"model": "tiny",\n "messages": [{"role": "user", "content": "é"}],\n ' + field + "}"

    answer = await edge.client.post("/v1/chat/completions", content=body.encode())

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert "not valid JSON" not in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "tiny", "user": "\\u12"}', "not valid JSON"),
        (b'{"model": "tiny", "seed": 9999x}', "not valid JSON"),
        (b'{"user": "\xff"}', "not UTF-8: byte 11 is 0xff"),
        ('{"model": "tiny"}'.encode("utf-16"), "not UTF-8: byte 1 is 0xff"),
        (b"9" * 5000, "the body: is a number of 5000 digits"),
    ],
)
async def test_what_is_no_json_is_called_so(make_edge, body: bytes, words: str) -> None:
    edge = await make_edge()

    answer = await edge.client.post("/v1/chat/completions", content=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
    assert words in answer.json()["error"]["message"]


async def test_a_byte_order_mark_is_passed_over(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    body = b"\xef\xbb\xbf" + json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()

    assert (await edge.client.post("/v1/completions", content=body)).status_code == 200


async def test_of_fields_with_one_name_the_last_counts(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    body = '{"model": "tiny", "prompt": "a", "max_tokens": 7, "max_tokens": 2}'

    answer = await edge.client.post("/v1/completions", content=body)

    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
async def test_a_compressed_body_is_415_with_a_way_out(make_edge, encoding: str) -> None:
    edge = await make_edge()
    bomb = gzip.compress(b" " * 10_000_000)

    answer = await edge.client.post("/v1/completions", content=bomb, headers={"content-encoding": encoding})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (415, "unsupported_encoding")
    assert "send the body as it is" in error["message"]
    assert answer.headers["accept-encoding"] == "identity"


async def test_a_body_that_says_it_is_not_compressed_is_read(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}

    answer = await edge.client.post("/v1/completions", json=body, headers={"content-encoding": "Identity"})

    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        ('{"model": "m", "prompt": "', '\\"', ""),
        ('{"model": "m", "prompt": "', "\\\\", "\\"),
        ('{"model": "m", "prompt": "', '\\"a\\"', '"'),
        ('{"model": "m", "prompt": ', "[0,", ""),
        ('{"model": "m", "prompt": [', "0,", ""),
        ('{"model": "m", "prompt": [', '"",', "x"),
        ('{"model": "m", "prompt": [', "0,", "9" * 5000),
        ('{"model": "m", ', '"a": "\\"",', ""),
        ("", "\n", ""),
        ("", " ", "x"),
        ("", '"', ""),
        ("", ":", ""),
    ],
)
def test_a_body_of_8_mb_that_is_no_json_is_refused_within_a_second(head: str, unit: str, tail: str) -> None:
    body = (head + unit * (8_000_000 // len(unit)) + tail).encode()
    with pytest.raises(ValueError, match="line") as refused:
        from_json(body)
    start = time.process_time()

    error = invalid_json(body, str(refused.value))

    assert time.process_time() - start < 1.0
    assert len(str(error)) < 300


def test_a_body_cut_short_costs_no_more_for_what_its_strings_hold() -> None:
    whole = json.dumps({"model": "m", "prompt": 'He said "no" and left. ' * 300_000})
    body = whole[:-20].encode()
    start = time.process_time()

    error = invalid_json(body, f"EOF while parsing a string at line 1 column {len(body)}")

    assert time.process_time() - start < 1.0
    assert "not valid JSON" in str(error)
