"""What a body asks of its tools: which the model sees, whether it must call one, and the grammar for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.openai.schema import ChatBody
from router.openai.tools_schema import MAX_TOOLS, AllowedToolsChoice, ChatTool, NamedTool
from router.text.grammars import WantedGrammar, quoted
from router.text.tokenizer import Tokenizer
from router.text.tools.formats import Tool, ToolFormat
from router.text.tools.object_schema import allows_objects
from workers.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses its tools."""

    tools: Sequence[Tool]
    """Those that may be called."""
    format: ToolFormat
    grammar: WantedGrammar | None
    is_named: bool = False
    """One function was named: its call is the answer, and no decision of the model's."""
    is_demanded: bool = False
    """The answer is nothing but calls."""

    @property
    def names(self) -> frozenset[str]:
        """Functions that may be called."""
        return frozenset(tool.name for tool in self.tools)


def tool_use(
    body: ChatBody,
    tool_format: ToolFormat,
    tokenizer: Tokenizer,
    answer: WantedGrammar | None,
    *,
    allows_auto: bool,
) -> ToolUse | None:
    """How the body's tools are used; None if they are not.

    Args:
        answer: the form that the body wants: by ``response_format`` for an answer that is no call, else for any.
        allows_auto: whether the model may decide by itself.

    Raises:
        InvalidRequest: a choice of what is not there, or of what cannot be had together.
    """
    tools = listed_tools(body.tools)
    choice = body.tool_choice
    if choice == "none" or (choice is None and not tools):
        return None
    if not tools:
        if choice == "auto":
            return None
        raise InvalidRequest("tool_choice: asks for a call, but there are no tools", "tool_choice")
    is_one = body.parallel_tool_calls is False
    must_call = choice == "required"
    is_named = isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool):
        tools, must_call, is_one = _chosen(tools, [choice]), True, True
    elif isinstance(choice, AllowedToolsChoice):
        tools = _chosen(tools, choice.allowed_tools.tools)
        must_call = choice.allowed_tools.mode == "required"

    def literal(marker: str) -> str:
        token_id = tokenizer.special_id(marker)
        return quoted(marker) if token_id is None else f"<[{token_id}]>"

    if must_call:
        if answer is not None and answer.param != "response_format":
            raise InvalidRequest(
                f"{answer.param}: an answer that must be a call has the form of its tools: "
                'leave it out, or set tool_choice to "none"',
                answer.param,
            )
        text = tool_format.grammar(tools, is_one=is_one, literal=literal)
        return ToolUse(tools, tool_format, WantedGrammar(text, "tools"), is_named, is_demanded=True)
    if not allows_auto:
        raise InvalidRequest(
            "tool_choice: this server does not let models decide (--no-enable-auto-tool-choice): "
            'name a function, or say "required"',
            "tool_choice",
        )
    if answer is not None and answer.schema is None:
        raise InvalidRequest(
            f"{answer.param}: cannot be followed by a model that may also call tools: "
            'set tool_choice to "none", or ask for JSON',
            answer.param,
        )
    grammar = None
    if answer is not None or is_one or any(tool.is_strict for tool in tools):
        schema = answer.schema if answer is not None else None
        try:
            text = tool_format.free_grammar(tools, literal, schema, is_one=is_one)
        except ValueError as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error
        grammar = WantedGrammar(text, "tools")
    return ToolUse(tools, tool_format, grammar)


def listed_tools(chat_tools: Sequence[ChatTool] | None) -> list[Tool]:
    """The functions of a body.

    Raises:
        InvalidRequest: they are too many, two have one name, or one takes what is no object.
    """
    given = chat_tools or []
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(given)} functions, the limit is {MAX_TOOLS}", "tools")
    tools = [
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters,
            bool(tool.function.strict),
            f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(given)
    ]
    for tool in tools:
        if tool.parameters is not None and not allows_objects(tool.parameters):
            raise InvalidRequest(
                f"{tool.param}: allows no object, which arguments always are: "
                'give {"type": "object", "properties": ...}',
                tool.param,
            )
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools: {twice!r} is there twice", "tools")
    return tools


def _chosen(tools: Sequence[Tool], chosen: Sequence[NamedTool]) -> list[Tool]:
    by_name = {tool.name: tool for tool in tools}
    unknown = next((one.function.name for one in chosen if one.function.name not in by_name), None)
    if unknown is not None:
        raise InvalidRequest(f"tool_choice: there is no function {unknown!r} among the tools", "tool_choice")
    return [by_name[one.function.name] for one in chosen]
