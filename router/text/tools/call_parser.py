"""Text and calls told apart while a message streams, for every format of ``router.text.tools.formats``.

What comes out never depends on how the text was cut into pieces: whatever may still become a call is held back,
and turns into text again if it does not.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum, auto

from router.text.tools.call_object import CallObject, ValueEnd
from router.text.tools.events import CallArguments, CallBegin, Content, MessageEvent
from router.text.tools.formats import CallSyntax

_SPACE = " \t\r\n"
_MOST_SPACE = 64
"""White space around a call's name in plain letters: with more it is none, and nothing longer is held back."""


class _At(Enum):
    TEXT = auto()
    OPEN = auto()
    CALL = auto()
    NAME = auto()
    ARGUMENTS = auto()
    AFTER = auto()


class CallParser:
    """Reads one message. White space around calls is dropped."""

    def __init__(self, syntax: CallSyntax, names: Set[str], *, is_demanded: bool = False) -> None:
        """Only calls of functions in ``names`` are calls.

        Args:
            is_demanded: a grammar lets the message be nothing but calls, so that one cut off before its name is
                told is a call nonetheless, and no text.
        """
        self._syntax = syntax
        self._is_demanded = is_demanded
        self._names = names
        self._pending = ""
        self._at = _At.TEXT
        self._is_bare = syntax.is_bare
        """A call may begin here without a marker."""
        self._in_list = False
        self._raw: list[str] = []
        """What was read since text ended, to give it back should it be no call."""
        self._call = CallObject()
        self._value: ValueEnd | None = None
        self._has_begun = False
        self._spaces: list[str] = []
        """White space that waits for what follows it."""
        self._lead: list[str] = []
        """White space, read already, before what is pending, of which it cannot be told yet whether it is text."""
        self._events: list[MessageEvent] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[MessageEvent]:
        """Take more text; return what is certain by now."""
        self._pending += text
        while self._step(is_last=False):
            pass
        return self._taken()

    def end(self) -> list[MessageEvent]:
        """What was held back, when nothing more comes."""
        if self._at is _At.TEXT:
            self._take_lead()
        while self._step(is_last=True):
            pass
        if self._at is not _At.TEXT and not self._has_begun:
            self._say("".join(self._raw))
        if not self.num_calls:
            self._events.append(Content("".join(self._spaces)))
        self._spaces = []
        return self._taken()

    def _taken(self) -> list[MessageEvent]:
        """Events since the last time, those of a kind that follow each other as one."""
        events, self._events = self._events, []
        taken: list[MessageEvent] = []
        for event in events:
            last = taken[-1] if taken else None
            if isinstance(event, CallArguments) and isinstance(last, CallArguments):
                taken[-1] = CallArguments(event.number, last.text + event.text)
            elif isinstance(event, Content) and isinstance(last, Content):
                taken[-1] = Content(last.text + event.text)
            elif not isinstance(event, Content) or event.text:
                taken.append(event)
        return taken

    def _step(self, *, is_last: bool) -> bool:
        """Read some of what is pending; False if nothing can be done with it yet."""
        if not self._pending:
            return False
        match self._at:
            case _At.TEXT:
                return self._read_text(is_last)
            case _At.OPEN:
                self._read_opening(self._next())
            case _At.CALL:
                self._read_call(self._next())
            case _At.NAME:
                return self._read_name(is_last)
            case _At.ARGUMENTS:
                self._read_arguments(self._next())
            case _At.AFTER:
                return self._read_after(is_last)
        return True

    def _next(self) -> str:
        char, self._pending = self._pending[0], self._pending[1:]
        if not self._has_begun:
            self._raw.append(char)
        return char

    def _read_text(self, is_last: bool) -> bool:
        if self._is_bare:
            stripped = self._pending.lstrip()
            if not stripped and not is_last:
                self._lead.append(self._pending)
                self._pending = ""
                return False
            if stripped and stripped[0] in self._syntax.openers:
                self._pending = stripped
                self._lead = []
                self._begin_opening("")
                return True
            may_be_marker = bool(self._syntax.begin) and self._syntax.begin.startswith(
                stripped[: len(self._syntax.begin)]
            )
            self._is_bare = bool(stripped) and may_be_marker
            self._take_lead()
        begin = self._syntax.begin
        at = self._pending.find(begin) if begin else -1
        if at >= 0:
            self._say(self._pending[:at])
            self._pending = self._pending[at + len(begin) :]
            self._begin_opening(begin)
            return True
        held = 0 if is_last else _overlap(self._pending, begin)
        cut = len(self._pending) - held
        if cut == 0:
            return False
        self._say(self._pending[:cut])
        self._pending = self._pending[cut:]
        return True

    def _begin_opening(self, raw: str) -> None:
        self._at, self._raw, self._has_begun = _At.OPEN, [raw], False

    def _read_opening(self, char: str) -> None:
        if char in _SPACE:
            return
        if char == "{":
            self._call = CallObject()
            self._at = _At.CALL
            self._call.feed(char)
        elif char == "[" and self._syntax.has_lists and not self._in_list:
            self._in_list = True
        elif char == "]" and self._in_list:
            self._in_list = False
            self._at = _At.AFTER
        elif self._syntax.arguments_marker and not self._in_list:
            self._pending, self._raw = char + self._pending, self._raw[:-1]
            self._at = _At.NAME
        else:
            self._give_back()

    def _read_call(self, char: str) -> None:
        call = self._call
        call.feed(char)
        if not self._has_begun:
            if call.is_broken or (call.name is not None and call.name not in self._names):
                self._give_back()
                return
            if call.name is None:
                return
            self._begin_call(call.name)
        if arguments := call.take_arguments():
            self._events.append(CallArguments(self.num_calls - 1, arguments))
        if call.is_done or call.is_broken:
            self._at = _At.AFTER

    def _read_name(self, is_last: bool) -> bool:
        """A function's name in plain letters, then a marker or at once the arguments."""
        marker = self._syntax.arguments_marker
        most = max(map(len, self._names), default=0) + len(marker) + _MOST_SPACE
        ends = [end for end in (self._pending.find(marker), self._pending.find("{")) if end >= 0]
        if not ends:
            said, bracket, rest = self._pending.partition("[")
            may_go_on = any(name.startswith(said.strip()) for name in self._names)
            may_go_on = may_go_on and marker.startswith(bracket + rest) and len(self._pending) <= most
            if is_last or not may_go_on:
                self._give_back(self._pending)
                return True
            return False
        name = self._pending[: min(ends)].strip()
        rest = self._pending[min(ends) :].removeprefix(marker).lstrip()
        is_too_long = len(self._pending) - len(rest) > most
        if not rest and not is_last and not is_too_long:
            return False
        if is_too_long or name not in self._names or not rest.startswith("{"):
            self._give_back(self._pending)
            return True
        self._pending = rest[1:]
        self._begin_call(name)
        self._events.append(CallArguments(self.num_calls - 1, "{"))
        self._value = ValueEnd("{")
        self._at = _At.ARGUMENTS
        return True

    def _read_arguments(self, char: str) -> None:
        assert self._value is not None
        self._value.takes(char)
        self._events.append(CallArguments(self.num_calls - 1, char))
        if self._value.is_over:
            self._at = _At.AFTER

    def _read_after(self, is_last: bool) -> bool:
        stripped = self._pending.lstrip()
        if not stripped:
            if not is_last:
                self._lead.append(self._pending)
            self._pending = ""
            return False
        char, end = stripped[0], self._syntax.end
        if self._in_list and char in ",]":
            self._pending = stripped[1:]
            if char == ",":
                self._begin_opening("")
            else:
                self._in_list = False
        elif char in self._syntax.separators and not self._in_list:
            self._pending = stripped[1:]
            self._begin_opening(char)
        elif end and stripped.startswith(end):
            self._pending = stripped[len(end) :]
            self._at = _At.TEXT
        elif end and end.startswith(stripped):
            if is_last:  # cut off within the marker
                self._pending = ""
            return False
        else:
            self._in_list = False
            self._at = _At.TEXT
            self._take_lead()
            return True
        self._lead = []
        return True

    def _take_lead(self) -> None:
        self._pending = "".join(self._lead) + self._pending
        self._lead = []

    def _begin_call(self, name: str) -> None:
        self._events.append(CallBegin(self.num_calls, name))
        self.num_calls += 1
        self._has_begun = True
        self._is_bare = False
        self._spaces = []

    def _give_back(self, pending: str = "") -> None:
        """It was no call: what was read is text, and so is what is ``pending``."""
        self._pending = self._pending[len(pending) :]
        self._at, self._is_bare, self._in_list = _At.TEXT, False, False
        self._say("".join(self._raw) + pending)
        self._raw = []

    def _say(self, text: str) -> None:
        """Text for the reader; white space waits for what follows it."""
        if self._is_demanded:
            return
        if not text.rstrip(_SPACE):
            self._spaces.append(text)
            return
        text = "".join(self._spaces) + text
        said = text.rstrip(_SPACE)
        self._spaces = [text[len(said) :]]
        self._events.append(Content(said))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that ``marker`` begins with, and is not all of."""
    return next(
        (
            length
            for length in range(min(len(marker) - 1, len(text)), 0, -1)
            if marker.startswith(text[-length:])
        ),
        0,
    )
