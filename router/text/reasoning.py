"""Thinking told apart from the answer while a message streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.text.tools.events import Content, MessageEvent, Reasoning

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a family of models marks its thinking."""

    begin: str = "<think>"
    end: str = "</think>"
    always_thinks: bool = False
    """It thinks from the first token, whether it says so or not."""


REASONING: Mapping[str, ReasoningSyntax] = {
    "deepseek_r1": ReasoningSyntax(always_thinks=True),
    "qwen3": ReasoningSyntax(),
    "think": ReasoningSyntax(),
}


class ReasoningParser:
    """Reads one message; white space next to the markers is dropped."""

    def __init__(self, syntax: ReasoningSyntax, *, is_thinking: bool | None) -> None:
        """``is_thinking`` says what the prompt has settled: its thinking is open, or over; None: neither."""
        self._syntax = syntax
        self._pending = ""
        self._spaces: list[str] = []
        """White space that waits for what follows it: before anything was said, or within the thinking."""
        self._may_begin = is_thinking is not False
        """Thinking may still begin: nothing but white space and perhaps a piece of the marker has come."""
        self._is_thinking = False
        self._starts_inside = bool(is_thinking) or (is_thinking is None and syntax.always_thinks)
        self._is_answer_begun = is_thinking is False

    def feed(self, text: str) -> list[MessageEvent]:
        """Take more text; return what is certain by now."""
        self._pending += text
        return self._read(is_last=False)

    def end(self) -> list[MessageEvent]:
        """What was held back, when nothing more comes."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._may_begin and not self._begin(is_last):
            return events
        if self._is_thinking:
            self._think(events, is_last)
        if not self._is_thinking and self._pending:
            said = self._pending if self._is_answer_begun else self._pending.lstrip(_SPACE)
            self._pending = ""
            if said:
                self._is_answer_begun = True
                events.append(Content(said))
        return events

    def _begin(self, is_last: bool) -> bool:
        """Look for the marker at the start; False while that cannot be told."""
        begin = self._syntax.begin
        stripped = self._pending.lstrip(_SPACE)
        if not stripped and not is_last:
            self._spaces.append(self._pending)
            self._pending = ""
            return False
        if begin.startswith(stripped) and stripped != begin and not is_last:
            return False
        self._may_begin = False
        if stripped.startswith(begin):
            self._pending = stripped[len(begin) :]
            self._is_thinking = True
        elif self._starts_inside:
            self._pending = stripped
            self._is_thinking = True
        else:
            self._is_answer_begun = True
            self._pending = "".join(self._spaces) + self._pending
        self._spaces = []
        return True

    def _think(self, events: list[MessageEvent], is_last: bool) -> None:
        at = self._pending.find(self._syntax.end)
        if at >= 0:
            self._say(events, self._pending[:at])
            self._spaces = []
            self._pending = self._pending[at + len(self._syntax.end) :]
            self._is_thinking = False
            return
        end = self._syntax.end
        held = 0
        if not is_last:
            lengths = range(min(len(end) - 1, len(self._pending)), 0, -1)
            held = next((n for n in lengths if end.startswith(self._pending[-n:])), 0)
        cut = len(self._pending) - held
        self._say(events, self._pending[:cut])
        self._pending = self._pending[cut:]

    def _say(self, events: list[MessageEvent], text: str) -> None:
        """White space waits for what follows it, and is dropped at either end."""
        if not text.rstrip(_SPACE):
            if self._has_thought:
                self._spaces.append(text)
            return
        text = "".join(self._spaces) + text
        said = text.rstrip(_SPACE)
        self._spaces = [text[len(said) :]]
        events.append(Reasoning(said if self._has_thought else said.lstrip(_SPACE)))
        self._has_thought = True

    _has_thought = False
