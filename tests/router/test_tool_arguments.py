"""Arguments of calls that a grammar demands: what may stand in them, and how much space around it."""

from __future__ import annotations

from typing import Any

import pytest

from router.scripted_replica import ScriptedReplica
from workers.engine.constraint import GrammarFailed

PARSERS = ["hermes", "llama3_json", "mistral", "json"]
AROUND = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "mistral": ("[TOOL_CALLS][", "]")}
"""What stands around a call."""


class Demanded:
    """The grammar of a call of ``f``, which takes ``parameters``."""

    def __init__(self, edge: Any, compiler: Any, parser: str) -> None:
        self._edge, self._compiler, self._parser = edge, compiler, parser

    async def ask(self, parameters: dict[str, Any] | None) -> None:
        function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
        choice = {"type": "function", "function": {"name": "f"}}
        tools = [{"type": "function", "function": function}]
        answer = await self._edge.chat(tools=tools, tool_choice=choice, max_tokens=1)
        assert answer.status_code == 200, answer.text

    def allows(self, arguments: str) -> bool:
        """True if the last call that was asked for may have these."""
        matcher = self._compiler.matcher(self._edge.replica.submits[-1].params.grammar)
        begin, end = AROUND.get(self._parser, ("", ""))
        key = "parameters" if self._parser == "llama3_json" else "arguments"
        try:
            for byte in f'{begin}{{"name": "f", "{key}": {arguments}}}{end}'.encode():
                matcher.accept(byte)
        except GrammarFailed:
            return False
        return bool(matcher.is_accepting)


@pytest.fixture(params=PARSERS)
async def demanded(request, make_edge, byte_vocabulary, engine_replica) -> Demanded:
    edge = await make_edge(ScriptedReplica(), served={"tool_call_parser": request.param})
    return Demanded(edge, engine_replica.EngineReplica(byte_vocabulary).grammars, request.param)


async def test_a_demanded_call_has_no_arguments_but_those_that_are_listed(demanded: Demanded) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    await demanded.ask({"type": "object", "properties": {"a": inner}})

    good = ("{}", '{"a":{}}', '{"a":{"b":1}}')
    bad = ('{"c":1}', '{"a":{"c":1}}', '{"a":{},"c":1}')

    assert [text for text in good if not demanded.allows(text)] == []
    assert [text for text in bad if demanded.allows(text)] == []


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "required": [], "additionalProperties": False, "title": "F"},
    ],
)
async def test_a_function_that_takes_nothing_is_called_in_one_way(
    demanded: Demanded, parameters: Any
) -> None:
    await demanded.ask(parameters)

    assert demanded.allows("{}")
    assert [text for text in ("{ }", "{\n}", "{\n  }", '{"a":1}', "null") if demanded.allows(text)] == []


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {"a": {}}}])
async def test_there_is_little_room_for_white_space_in_arguments(demanded: Demanded, parameters: Any) -> None:
    await demanded.ask(parameters)

    inside = ["", " ", "\n", "\n" + " " * 16]
    too_much = ["  ", "\t", "\n\n", "\n" + " " * 17, " \n"]

    assert [space for space in inside if not demanded.allows(f"{{{space}}}")] == []
    assert [space for space in too_much if demanded.allows(f"{{{space}}}")] == []


async def test_a_function_that_cannot_be_called_is_refused(demanded: Demanded) -> None:
    parameters = {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False}

    with pytest.raises(AssertionError, match="tools"):
        await demanded.ask(parameters)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"parallel_tool_calls": False}])
async def test_the_function_whose_parameters_cannot_be_enforced_is_named(
    make_edge: Any, fields: dict[str, Any]
) -> None:
    edge = await make_edge(ScriptedReplica())
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    functions = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g", "parameters": bad}]

    answer = await edge.chat(tools=[{"type": "function", "function": one} for one in functions], **fields)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert error["message"].startswith("tools[1].function.parameters: ")
    assert "uniqueItems" in error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": ["object", "null"]},
        {"enum": [5, {}]},
        {"anyOf": [{"type": "integer"}, {"type": "object"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "integer", "null"]}}},
    ],
    ids=str,
)
async def test_arguments_are_an_object_whatever_else_the_schema_allows(
    demanded: Demanded, parameters: dict[str, Any]
) -> None:
    await demanded.ask(parameters)

    assert demanded.allows("{}")
    assert [text for text in ("5", "null", "[]", '"a"') if demanded.allows(text)] == []
