"""One call as JSON, ``{"name": "f", "arguments": {...}}``, read character by character.

The arguments are handed on as they are spelled, without waiting for their end.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    DONE = auto()


class ValueEnd:
    """Finds where a JSON value ends."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "_is_scalar", "is_over")

    def __init__(self, first: str) -> None:
        """Begin with the value's first character, already read."""
        self._depth = 1 if first in "{[" else 0
        self._in_string = first == '"'
        self._is_escaped = False
        self._is_scalar = first not in '{["'
        self.is_over = False

    def takes(self, char: str) -> bool:
        """True if ``char`` belongs to the value; ``is_over`` afterwards if it was the last."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                self.is_over = self._depth == 0
            return True
        if self._is_scalar:
            return char not in _SPACE + ",}]"
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0
        return True


class CallObject:
    """Reads one call. ``arguments`` collects what ``take_arguments`` has not handed on yet."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_broken = False
        """True once it can be no call."""
        self._at = _At.OPEN
        self._key = ""
        self._value: list[str] = []
        self._end: ValueEnd | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self._is_text = False
        """The arguments are JSON inside a string, as some models write them."""

    @property
    def is_done(self) -> bool:
        """True once the closing brace is read."""
        return self._at is _At.DONE

    def feed(self, char: str) -> None:
        """Read a character; not to be called once it is done or broken."""
        if self._at is _At.IN_VALUE:
            self._read_value(char)
        elif char in _SPACE:
            return
        elif self._at is _At.OPEN and char == "{":
            self._at = _At.KEY
        elif self._at is _At.KEY and char == '"':
            self._begin_value(char)
        elif self._at is _At.KEY and char == "}":
            self._close()
        elif self._at is _At.KEY and char == ",":
            return
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE and char not in ",:}]":
            self._begin_value(char)
        else:
            self.is_broken = True

    def take_arguments(self) -> str:
        """Arguments read since the last call."""
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _begin_value(self, char: str) -> None:
        self._end = ValueEnd(char)
        self._value = [char]
        is_arguments = self._at is _At.VALUE and self._key in _ARGUMENT_KEYS
        if is_arguments:
            self._has_arguments = True
            self._is_text = char == '"'
            if char == "{":
                self._arguments.append(char)
            elif char != '"':
                self._is_text = True  # null, say: decided at its end
        self._at_key = self._at is _At.KEY
        self._at = _At.IN_VALUE

    def _read_value(self, char: str) -> None:
        assert self._end is not None
        is_arguments = not self._at_key and self._key in _ARGUMENT_KEYS
        if self._end.takes(char):
            if is_arguments and not self._is_text:
                self._arguments.append(char)
            else:
                self._value.append(char)
            if self._end.is_over:
                self._finish_value(is_arguments)
            return
        self._finish_value(is_arguments)
        if not self.is_broken:
            self.feed(char)

    def _finish_value(self, is_arguments: bool) -> None:
        at_key = self._at_key
        self._at = _At.COLON if at_key else _At.KEY
        if not is_arguments or self._is_text:
            spelled = "".join(self._value)
            try:
                value = json.loads(spelled, strict=False)
            except ValueError:
                self.is_broken = self.name is None
                return
            if at_key:
                self._key = value
            elif is_arguments:
                self._arguments.append(
                    value if isinstance(value, str) else "{}" if value is None else spelled
                )
            elif self._key in _NAME_KEYS:
                if isinstance(value, str):
                    self.name = value
                else:
                    self.is_broken = self.name is None

    def _close(self) -> None:
        self._at = _At.DONE
        if self.name is None:
            self.is_broken = True
        elif not self._has_arguments:
            self._arguments.append("{}")
