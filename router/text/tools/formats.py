"""How models write tool calls: one small class a format, with what a parser and a grammar need to know of it.

Markers and keys as the models' own chat templates have them: Hermes (NousResearch, also Qwen 2.5 and 3), Llama 3.1's
JSON calls, Mistral's ``[TOOL_CALLS]``, and plain JSON for models that were taught none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.text.grammars import Schema, json_rule, quoted
from router.text.tools.closed_schema import closed
from router.text.tools.object_schema import of_objects

MAX_CALLS = 16
"""Calls of one message where a grammar says how many there may be."""

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Literal = Callable[[str], str]
"""A marker as it stands in a Lark rule: text, or the one token that it is."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Schema | None = None
    is_strict: bool = False
    """Its arguments match its schema even where the model is free to call it or not."""
    param: str = "tools"
    """What errors call its parameters."""

    @property
    def schema(self) -> Schema:
        """Of its arguments, without such as it does not name."""
        return _NO_ARGUMENTS if self.parameters is None else closed(of_objects(self.parameters))

    @property
    def takes_nothing(self) -> bool:
        """True if its schema allows the empty object alone."""
        schema = self.schema
        return (
            isinstance(schema, Mapping)
            and {**schema, **_NO_ARGUMENTS} == schema
            and not schema.get("required")
            and schema.keys() <= {*_NO_ARGUMENTS, "required", "title", "description", "$schema"}
        )

    def spelled(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates have it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What a parser looks for."""

    begin: str = ""
    """Marker before calls."""
    end: str = ""
    """Marker behind them."""
    is_bare: bool = False
    """A message may be calls without a marker."""
    has_lists: bool = False
    separators: str = ""
    """Between calls that stand in no list."""
    arguments_marker: str = ""
    """Between a name in plain letters and its arguments, where calls may be so written."""

    @property
    def openers(self) -> str:
        """Characters that a bare call begins with."""
        return "{[" if self.has_lists else "{"


class ToolFormat:
    """One format. ``calls`` is the Lark rule body of one or more calls."""

    name: str
    syntax: CallSyntax
    arguments_key = "arguments"
    shows_special_tokens = False
    """Its markers are special tokens, which text leaves out by default."""
    id_chars = 24
    """Length of a call's id."""

    def calls(self, call: str, num_more: int, literal: Literal) -> str:
        """Calls around the rule named ``call``: one, and up to ``num_more``."""
        raise NotImplementedError

    def grammar(self, tools: Sequence[Tool], *, is_one: bool, literal: Literal) -> str:
        """Of a message that is nothing but calls."""
        return f"start: calls\n{self.rules(tools, is_one=is_one, literal=literal)}"

    def free_grammar(
        self, tools: Sequence[Tool], literal: Literal, answer: Schema | None = None, *, is_one: bool = False
    ) -> str:
        """Of a message that is text or calls as the model likes; the text matches ``answer``, if there is one.

        Raises:
            ValueError: the schemas cannot stand beside each other.
        """
        if answer is not None and self.syntax.is_bare:
            # One schema, since the beginnings of two grammars would be one lexeme.
            calls: list[Schema] = [self._call_schema(tool) for tool in tools]
            if self.syntax.has_lists and not is_one:
                calls.append(
                    {"type": "array", "items": {"anyOf": calls[:]}, "minItems": 1, "maxItems": MAX_CALLS}
                )
            either = {"anyOf": [*calls, answer]}
            if '"$ref"' in json.dumps(either):
                raise ValueError(
                    "a schema with $ref cannot stand beside tools that the model may call or not"
                )
            return f"start: {json_rule(either)}"
        rules = self.rules(tools, is_one=is_one, literal=literal)
        if answer is not None:
            return f"start: calls | answer\nanswer: {json_rule(answer)}\n{rules}"
        if self.syntax.is_bare:
            return f"start: calls | TEXT?\nTEXT: /[^\\s{{\\[](.|\\n)*/\n{rules}"
        begin = literal(self.syntax.begin)
        if begin.startswith("<["):
            return f"start: TEXT? calls?\nTEXT: /(.|\\n)+/\n{rules}"
        # As llguidance's own structural tags have it: a lexeme of text ends with the first marker.
        unit = "calls" if f"calls: {begin}" in rules else "call"
        lines = [line for line in rules.split("\n") if unit == "calls" or not line.startswith("calls:")]
        rest = "\n".join(lines).replace(f"{unit}: {begin} ", f"{unit}: ", 1)
        times = "?" if is_one else "*"
        lexemes = f"TEXT: /(.|\\n)+/\nopening[lazy]: TEXT? {begin}"
        return f"start: (opening {unit}){times} TEXT?\n{lexemes}\n{rest}"

    def rules(self, tools: Sequence[Tool], *, is_one: bool, literal: Literal) -> str:
        """The rules ``calls``, ``call`` and one for each function."""
        lines = [f"calls: {self.calls('call', 0 if is_one else MAX_CALLS - 1, literal)}"]
        functions = [f"function_{i}" for i in range(len(tools))]
        any_of_them = f"({' | '.join(functions)})"
        lines.append(f"call: {self.call(any_of_them, literal)}")
        for name, tool in zip(functions, tools, strict=True):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": '
            lines.append(f"{name}: {quoted(head)} arguments_{name} {quoted('}')}")
            arguments = quoted("{}") if tool.takes_nothing else json_rule(tool.schema)
            lines.append(f"arguments_{name}: {arguments}")
        return "\n".join(lines)

    def call(self, function: str, literal: Literal) -> str:
        """Body of the rule ``call``, around the rule of a function's object."""
        return function

    def _call_schema(self, tool: Tool) -> Schema:
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.arguments_key: tool.schema},
            "required": ["name", self.arguments_key],
            "additionalProperties": False,
        }


class Hermes(ToolFormat):
    """``<tool_call>`` around each call."""

    name = "hermes"
    syntax = CallSyntax(begin="<tool_call>", end="</tool_call>")

    def calls(self, call: str, num_more: int, literal: Literal) -> str:
        """See ``ToolFormat``."""
        return f'{call} ("\\n" {call}){{0,{num_more}}}' if num_more else call

    def call(self, function: str, literal: Literal) -> str:
        """See ``ToolFormat``."""
        return f'{literal(self.syntax.begin)} "\\n" {function} "\\n" {literal(self.syntax.end)}'


class Llama3Json(ToolFormat):
    """Objects with "parameters", separated by semicolons."""

    name = "llama3_json"
    syntax = CallSyntax(begin="<|python_tag|>", is_bare=True, separators=";")
    arguments_key = "parameters"
    shows_special_tokens = True

    def calls(self, call: str, num_more: int, literal: Literal) -> str:
        """See ``ToolFormat``."""
        return f'{call} ("; " {call}){{0,{num_more}}}' if num_more else call


class Mistral(ToolFormat):
    """A list behind ``[TOOL_CALLS]``; newer models write ``name[ARGS]{...}``."""

    name = "mistral"
    syntax = CallSyntax(begin="[TOOL_CALLS]", has_lists=True, arguments_marker="[ARGS]")
    shows_special_tokens = True
    id_chars = 9

    def calls(self, call: str, num_more: int, literal: Literal) -> str:
        """See ``ToolFormat``."""
        more = f'(", " {call}){{0,{num_more}}} ' if num_more else ""
        return f'{literal(self.syntax.begin)} "[" {call} {more}"]"'


class PlainJson(ToolFormat):
    """An object, or a list of them, and nothing else."""

    name = "json"
    syntax = CallSyntax(is_bare=True, has_lists=True, separators=";")

    def calls(self, call: str, num_more: int, literal: Literal) -> str:
        """See ``ToolFormat``."""
        return f'{call} | "[" {call} (", " {call}){{0,{num_more}}} "]"' if num_more else call


FORMATS: Mapping[str, ToolFormat] = {
    **{one.name: one for one in (Hermes(), Llama3Json(), Mistral(), PlainJson())},
    # Names that vLLM's users type.
    "qwen": Hermes(),
    "llama": Llama3Json(),
}


def format_of_template(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; plain JSON if it teaches none."""
    found = template or ""
    if "[TOOL_CALLS]" in found:
        return FORMATS["mistral"]
    if "<tool_call>" in found:
        return FORMATS["hermes"]
    if "<|python_tag|>" in found:
        return FORMATS["llama3_json"]
    return FORMATS["json"]
