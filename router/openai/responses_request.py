"""A body of the responses API as the chat body that asks for the same."""

from __future__ import annotations

from typing import Any

from router.openai.responses_schema import (
    AllowedChoice,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    InputMessage,
    ResponsesBody,
)
from router.openai.schema import ChatBody

LOGPROBS = "message.output_text.logprobs"
"""The word of ``include`` that asks for log-probabilities."""

_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same wish in the other API's words.

    Raises:
        ValidationError: what is no valid wish there; ``responses_param`` says which field here.
    """
    wants_logprobs = LOGPROBS in (body.include or ())
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
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
    return ChatBody.model_validate(fields)


def responses_message(message: str, param: str | None) -> str:
    """An error of the chat's field ``param`` in this API's words."""
    ours = responses_param(param)
    return f"{ours}{message[len(param) :]}" if param and ours and message.startswith(f"{param}:") else message


def responses_param(param: str | None) -> str | None:
    """The field of the responses API for one of the chat's."""
    if param is not None and param.startswith("tools["):
        return param.replace("].function", "]", 1)
    for theirs, ours in _PARAMS.items():
        if param is not None and param.startswith(theirs):
            return ours
    return param


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, InputMessage):
            found.append({"role": item.role, "content": item.text})
        elif isinstance(item, FunctionCallItem):
            call = {"id": item.call_id, "type": "function"}
            function = {"name": item.name, "arguments": item.arguments}
            # Calls of one answer are one message, its words included.
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append({**call, "function": function})
        elif isinstance(item, FunctionOutputItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
    return found


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
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
