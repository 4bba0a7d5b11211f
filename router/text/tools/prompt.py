"""Tools and calls as a chat template takes them; told in plain words where a template knows none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = """You can call functions. Each is described by a JSON object, one a line:
{tools}
To call a function, answer with nothing but a JSON object {{"name": ..., "arguments": {{...}}}}, or with a list of \
such objects to call several. Its result comes in the next message. If no function helps, answer in plain words."""


def with_tools_told(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, object]]:
    """Messages for a template that knows neither tools nor calls nor results."""
    told: list[dict[str, object]] = []
    if tools:
        text = _TOLD.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        )
        told.append({"role": "system", "content": text})
    for message in messages:
        if message["role"] == "system" and told and told[0]["role"] == "system" and len(told) == 1:
            told[0] = {"role": "system", "content": f"{message['content']}\n\n{told[0]['content']}"}
        elif message["role"] == "tool":
            told.append({"role": "user", "content": f"Result of the call: {message['content']}"})
        elif message.get("tool_calls"):
            told.append({"role": "assistant", "content": _spelled(message)})
        else:
            told.append(dict(message))
    return told


def _spelled(message: Mapping[str, object]) -> str:
    """An assistant's message as it would have written it itself."""
    calls: Any = message["tool_calls"]
    objects = [call["function"] for call in calls]
    spelled = json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False)
    return f"{message['content']}\n{spelled}" if message.get("content") else spelled
