"""A body of the responses API as the chat body that asks for the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from router.openai.errors import invalid_body
from router.openai.responses_schema import (
    LOGPROBS,
    AllowedChoice,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    InputMessage,
    PlainFormat,
    ResponsesBody,
)
from router.openai.schema import ChatBody
from workers.engine.errors import InvalidRequest, UserError

_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What the fields of a chat are called in the responses API that it says the same as."""

    places: Mapping[str, str]
    """Of messages and calls, each an item of the input."""

    def ours(self, error: UserError) -> UserError:
        """An error of the chat in this API's words."""
        param = self.param(error.param)
        message = error.message
        if error.param and param and message.startswith(f"{error.param}:"):
            message = param + message[len(error.param) :]
        return type(error)(message, param)

    def param(self, param: str | None) -> str | None:
        """The field of this API for one of the chat's."""
        if param is None:
            return None
        around = [
            place for place in self.places if param.startswith(place) and param[len(place) :][:1] in ("", ".")
        ]
        if around:
            place = max(around, key=len)
            return self.places[place] + param[len(place) :]
        if param.startswith("tools["):
            return param.replace("].function", "]", 1)
        return next((ours for theirs, ours in _PARAMS.items() if param.startswith(theirs)), param)


def told_as_chat(body: ResponsesBody) -> tuple[ChatBody, FieldNames]:
    """The chat that asks for the same, and the names that its fields have here.

    Raises:
        InvalidRequest: there is none; in this API's words.
    """
    messages, places = _messages(body)
    names = FieldNames(places)
    try:
        return ChatBody.model_validate(_fields(body, messages)), names
    except ValidationError as error:
        raise names.ours(invalid_body(error)) from None
    except UserError as error:
        raise names.ours(error) from None


def _fields(body: ResponsesBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    wants_logprobs = LOGPROBS in (body.include or ())
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "parallel_tool_calls": body.parallel_tool_calls if body.tools else None,
        "response_format": _response_format(body),
        "prompt_cache_key": body.prompt_cache_key,
    }
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    fields["tool_choice"] = _tool_choice(body)
    return fields


def _messages(body: ResponsesBody) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The conversation, and which item each message and call of it was."""
    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}

    def say(place: str, **message: Any) -> str:
        found.append(message)
        named = f"messages[{len(found) - 1}]"
        places[named] = place
        return named

    if body.instructions:
        say("instructions", role="system", content=body.instructions)
    if isinstance(body.input, str):
        say("input", role="user", content=body.input)
        return found, places
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        if isinstance(item, InputMessage):
            if item.refuses and item.role != "assistant":
                raise InvalidRequest(f"{place}.content: only an assistant refuses", f"{place}.content")
            say(place, role=item.role, content=item.text)
        elif isinstance(item, FunctionCallItem):
            # Calls of one answer are one message, its words included.
            if not (found and found[-1]["role"] == "assistant"):
                say(place, role="assistant", content=None)
            calls = found[-1].setdefault("tool_calls", [])
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
            places[f"messages[{len(found) - 1}].tool_calls[{len(calls) - 1}].function"] = place
        elif isinstance(item, FunctionOutputItem):
            named = say(place, role="tool", tool_call_id=item.call_id, content=item.text)
            places |= {f"{named}.tool_call_id": f"{place}.call_id", f"{named}.content": f"{place}.output"}
    return found, places


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if isinstance(form, PlainFormat):
        return {"type": form.type}
    wish = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in wish.items() if value is not None},
    }


def _tool_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return _named(choice)
    if isinstance(choice, AllowedChoice):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]},
        }
    return choice


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}
