"""One choice's message while it grows: OpenAI's deltas of it, and the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.text.message import MessageParser
from router.text.tools.events import CallArguments, CallBegin, Content, MessageEvent, Reasoning

_NewId = Callable[[int], str]


class GrowingMessage:
    """Fed with text; remembers all of it."""

    def __init__(self, parser: MessageParser, new_id: _NewId, *, is_demanded: bool = False) -> None:
        """``new_id`` gives the id of the n-th call; ``is_demanded`` says that it can be nothing but calls."""
        self._is_demanded = is_demanded
        self._parser = parser
        self._new_id = new_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def feed(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Take more text; return the deltas that it makes."""
        events = self._parser.feed(text)
        if is_last:
            events = [*events, *self._parser.end()]
        return [self._delta(event) for event in events]

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return len(self._calls)

    def whole(self) -> dict[str, Any]:
        """The message, once all text has come. Without text its content is null, as in OpenAI's API."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._is_without_text else ""),
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    @property
    def _is_without_text(self) -> bool:
        """True if it says something, or must, that is no text."""
        return self._is_demanded or bool(self._calls or self._reasoning)

    def _delta(self, event: MessageEvent) -> dict[str, Any]:
        if isinstance(event, Content):
            self._content.append(event.text)
            return {"content": event.text}
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            call = {"id": self._new_id(event.number), "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": event.number, **call, "function": dict(function)}]}
        assert isinstance(event, CallArguments)
        self._calls[event.number]["function"]["arguments"] += event.text
        return {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}
