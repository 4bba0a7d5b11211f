"""An assistant's message as it streams: its thinking, its text, its calls."""

from __future__ import annotations

from router.text.reasoning import ReasoningParser
from router.text.tools.call_parser import CallParser
from router.text.tools.events import Content, MessageEvent


class MessageParser:
    """Reads one choice's text. Events do not depend on how the text was cut into pieces, once joined."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._calls.num_calls if self._calls is not None else 0

    def feed(self, text: str) -> list[MessageEvent]:
        """Take more text; return what is certain by now."""
        events = (
            self._reasoning.feed(text) if self._reasoning is not None else [Content(text)] if text else []
        )
        return self._through_calls(list(events))

    def end(self) -> list[MessageEvent]:
        """What was held back, when nothing more comes."""
        events = self._through_calls(self._reasoning.end() if self._reasoning is not None else [])
        return events + (self._calls.end() if self._calls is not None else [])

    def _through_calls(self, events: list[MessageEvent]) -> list[MessageEvent]:
        if self._calls is None:
            return events
        found: list[MessageEvent] = []
        for event in events:
            found += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return found
