"""Structured output at the door: each form becomes a grammar for the engine, or a 400 that names the keyword."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from router.scripted_replica import ScriptedReplica
from router.text.grammar_process import make_compiler
from workers.engine.constraint import GrammarFailed

END = 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
EBNF = 'root ::= "yes" | "no"'
PERSON = '{"name":"Ann","age":7}'

# Fields of a request, texts that match, texts that do not.
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"response_format": FORMAT},
        [PERSON, '{"name": "é", "age": -1}'],
        ["[]", '{"age":7,', '{"name":"Ann"}'],
    ),
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", " {}"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ["{}"], ["1"]),
    ({"response_format": TAG}, ["hello", f"hm <f>{PERSON}</f> and on"], ["<f>{}</f>"]),
    ({"structured_outputs": {"json": SCHEMA}}, [PERSON], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, [PERSON], ["{}"]),
    ({"structured_outputs": {"regex": "[ab]{2}"}}, ["ab"], ["abc", "c"]),
    ({"structured_outputs": {"choice": ["yes", 'a "b"', "é"]}}, ["yes", 'a "b"', "é"], ["no"]),
    (
        {"guided_choice": ["", "a", "a b", "a/b", "a.b", '\\"#&~-%@<x>\n']},
        ["", "a b", "a/b", "a.b", '\\"#&~-%@<x>\n'],
        ["axb"],
    ),
    ({"structured_outputs": {"grammar": EBNF}}, ["yes", "no"], ["maybe"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, [f"<f>{PERSON}</f>"], ["<f>1"]),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "~?"}},
        ['{~"name":"A","age":~1}'],
        ["{ "],
    ),
    ({"guided_json": SCHEMA}, [PERSON], ["{}"]),
    ({"guided_json": True}, ["1", '{"a": [null]}'], ["a"]),
    ({"guided_regex": r"\d+ \w"}, ["12 a"], ["a"]),
    ({"guided_choice": ["yes", "no"]}, ["no"], ["maybe"]),
    ({"guided_grammar": 'start: "a"+ "b"'}, ["aab"], ["b"]),
]


def matches(byte_vocabulary, grammar: str, text: str) -> bool:
    """True if the text may stand as a whole output."""
    matcher = make_compiler(byte_vocabulary.token_bytes, byte_vocabulary.special_token_ids).matcher(grammar)
    try:
        for byte in text.encode():
            if matcher.is_complete:
                return False
            matcher.accept(byte)
    except GrammarFailed:
        return False
    return matcher.is_accepting


class PanicException(BaseException):
    """As pyo3 raises what has gone wrong in Rust."""

    __module__ = "pyo3_runtime"


async def test_a_panic_of_the_library_over_a_form_is_a_400(
    make_edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(pattern: str) -> str:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("router.text.grammars.LLMatcher.grammar_from_regex", panic)
    edge = await make_edge()

    answer = await edge.chat(guided_regex="a+")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS, ids=lambda value: str(value)[:50])
async def test_each_form_becomes_a_grammar(
    make_edge, byte_vocabulary, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    edge = await make_edge(ScriptedReplica())

    chat = await edge.chat(**fields, max_tokens=1)
    plain = await edge.complete(**fields, max_tokens=1)

    assert (chat.status_code, plain.status_code) == (200, 200), chat.text
    first, second = edge.replica.submits
    assert first.params.grammar == second.params.grammar
    assert [text for text in good if not matches(byte_vocabulary, first.params.grammar, text)] == []
    assert [text for text in bad if matches(byte_vocabulary, first.params.grammar, text)] == []


async def test_json_has_no_room_for_endless_white_space(make_edge, byte_vocabulary) -> None:
    edge = await make_edge(ScriptedReplica())
    await edge.chat(response_format={"type": "json_object"}, max_tokens=1)
    grammar = edge.replica.submits[0].params.grammar

    assert matches(byte_vocabulary, grammar, '{\n  "a": [\n    1\n  ]\n}')
    assert not matches(byte_vocabulary, grammar, '{"a":' + " " * 30 + "1}")
    assert not matches(byte_vocabulary, grammar, '{"a":\n\n1}')
    assert not matches(byte_vocabulary, grammar, '{"a":1}\n')


async def test_plain_text_asks_for_no_grammar(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    await edge.chat(response_format={"type": "text"}, max_tokens=1)

    assert edge.replica.submits[0].params.grammar == ""


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"if": {}, "then": {}}}, "guided_json", '"if"'),
        ({"guided_json": {"type": "objekt"}}, "guided_json", "objekt"),
        ({"guided_json": {"$ref": "http://example.com/a"}}, "guided_json", "example.com"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "nothing can match"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
        ({"guided_grammar": "root ::= )"}, "guided_grammar", "EBNF"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"response_format": {**TAG, "triggers": ["<g"]}}, "response_format", "<f>"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "JSON"),
        ({"guided_choice": ["x" * 2_000_000]}, "guided_choice", "1048576"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_enforced_is_a_400_that_says_what(
    make_edge, fields: dict[str, Any], param: str, words: str
) -> None:
    edge = await make_edge(ScriptedReplica())

    answer = await edge.chat(**fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert edge.replica.submits == []
    assert (await edge.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("num_choices", [2_001, 10_000])
async def test_thousands_of_choices_that_begin_alike_are_followed(
    make_edge, byte_vocabulary, num_choices: int
) -> None:
    edge = await make_edge(ScriptedReplica())
    choices = [f"customer-record-{i:06d}" for i in range(num_choices)]

    answer = await edge.chat(structured_outputs={"choice": choices}, max_tokens=1)

    assert answer.status_code == 200, answer.text
    grammar = edge.replica.submits[0].params.grammar
    assert matches(byte_vocabulary, grammar, choices[-1])
    assert not matches(byte_vocabulary, grammar, f"customer-record-{num_choices:06d}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["aaa"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": TAG}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tools"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_form_that_grows_too_complex_on_the_way_is_named_as_the_client_named_it(
    make_edge, fields: dict[str, Any], param: str
) -> None:
    edge = await make_edge(ScriptedReplica(script=lambda submit: [97] * 4000, step_s=0.001))
    words = "it grows beyond 10,000 states: make it simpler"
    error = {
        "message": f"{param}: {words}",
        "type": "grammar_too_complex",
        "param": param,
        "code": "grammar_too_complex",
    }

    whole = asyncio.create_task(edge.chat(**fields))
    await edge.replica.until(lambda: bool(edge.replica.submits))
    edge.replica.refuse(edge.replica.submits[0].request_id, words, "grammar")

    assert (await whole).status_code == 400
    assert (await whole).json()["error"] == error

    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True, **fields}
    async with (
        httpx.AsyncClient(base_url=await edge.listen()) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert '"role":"assistant"' in await anext(lines)
        edge.replica.refuse(edge.replica.submits[1].request_id, words, "grammar")
        rest = [line async for line in lines if line]

    assert json.loads(rest[-1].removeprefix("data: "))["error"] == error
