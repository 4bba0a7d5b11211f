"""What JSON allows and this API does not: numbers, nesting and text that the parser of bodies refuses.

The parser (jiter, of pydantic) says where it stopped, not in which field; that is found here, after the fact.
"""

from __future__ import annotations

import json
import re
from itertools import islice

from workers.engine.errors import InvalidRequest

MAX_DIGITS = 4300
"""Of one number: where jiter stops, as Python does."""
MAX_DEPTH = 200
"""Of objects and lists in each other: where jiter stops."""

MAX_FIELDS = 4096
"""Of any object in a body. pydantic reports every wrong field before the first can be told, 5 us each: a
megabyte of them would hold up all other streams for half a second."""
MAX_CONTAINERS = 20_000
"""Objects and lists in a body: ten times those of the longest list of texts that is allowed."""

MOST_TOKENS = 200_000
"""That are read, in some 0.15 s, to find the field at fault; further on the parser's own words must do."""

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},:]|[^\s\[\]{},:"]++', re.DOTALL)
"""A string that is never closed is one token up to the end: else each quote in it would begin another such search."""
_STRIDE = 65536
_POSITION = re.compile(r"at line (\d+) column (\d+)$")

JsonPath = tuple[str | int, ...]
"""Names of fields and places in lists, from the outermost in."""


def spelled(path: JsonPath) -> str | None:
    """``messages[0].role`` for ("messages", 0, "role"); long names are cut. None: the body itself."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if len(part) <= 80 else f"{part[:80]}…"
            text += f".{name}" if text else name
    return text or None


def invalid_json(body: bytes, message: str) -> InvalidRequest:
    """The error for a body that the parser refused with ``message``."""
    position = _POSITION.search(message)
    if position is not None:
        line, column = map(int, position.groups())
        found = _excess(body, _start_of_line(body, line) + column - 1)
        if found is not None:
            path, words = found
            param = spelled(path)
            return InvalidRequest(f"{param or 'the body'}: {words}", param)
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequest(f"the body is not UTF-8: byte {error.start + 1} is 0x{body[error.start]:02x}")
    return InvalidRequest(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")


def check_width(whole: object, what: str = "the body", param: str | None = None) -> None:
    """Refuse objects with absurdly many fields, and absurdly many objects.

    Raises:
        InvalidRequest: an object has more than ``MAX_FIELDS``, or there are more than ``MAX_CONTAINERS`` in ``what``.
    """
    if not isinstance(whole, dict | list):
        return
    waiting: list[dict[str, object] | list[object]] = [whole]
    num_containers = 0
    told = f"{param}: " if param is not None else ""
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and len(one) > MAX_FIELDS:
            raise InvalidRequest(f"{told}an object has {len(one)} fields, the limit is {MAX_FIELDS}", param)
        values = one.values() if isinstance(one, dict) else one
        inside = [value for value in values if isinstance(value, dict | list)]
        num_containers += len(inside)
        if num_containers > MAX_CONTAINERS:
            raise InvalidRequest(
                f"{told}{what} holds more than {MAX_CONTAINERS} objects and lists, which is the limit", param
            )
        waiting += inside


def _start_of_line(body: bytes, line: int) -> int:
    """Where a line begins, of those counted from 1; no list is made of what may be millions of lines."""
    start, num_left = 0, line - 1
    while start < len(body) and (num_here := body.count(b"\n", start, start + _STRIDE)) < num_left:
        start += _STRIDE
        num_left -= num_here
    for _ in range(num_left):
        start = body.find(b"\n", start) + 1
    return start


def _excess(body: bytes, offset: int) -> tuple[JsonPath, str] | None:
    """Which field the token at ``offset`` belongs to, and what is too much about it; None: no JSON, or too far on."""
    path: list[str | int] = []
    """Of what stands open, a name or place for each; a name is known once its colon has come."""
    name = ""
    for match in islice(_TOKEN.finditer(body), MOST_TOKENS):
        token = match.group()
        is_it = match.end() > offset
        if token in (b"{", b"["):
            if is_it and len(path) >= MAX_DEPTH:
                return tuple(path[:1]), f"is nested more than {MAX_DEPTH} levels deep, which is the limit"
            path.append("" if token == b"{" else 0)
        elif token in (b"}", b"]"):
            del path[-1:]
        elif token == b":" and path:
            path[-1] = name
        elif token == b"," and path:
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else ""
        elif is_it:
            words = _too_much(token)
            return None if words is None else (tuple(part for part in path if part != ""), words)
        elif token.startswith(b'"'):
            name = token[1:-1].decode("utf-8", "replace")
        if is_it:
            return None
    return None


def _too_much(token: bytes) -> str | None:
    digits = token.removeprefix(b"-")
    if digits.isdigit() and len(digits) > MAX_DIGITS:
        return f"is a number of {len(digits)} digits, the limit is {MAX_DIGITS}"
    if token.startswith(b'"'):
        try:
            text = json.loads(token)
        except ValueError:
            return None
        half = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
        if half is not None:
            return f"holds \\u{ord(half):04x}, one half of a surrogate pair, which is no character: send both halves"
    return None
