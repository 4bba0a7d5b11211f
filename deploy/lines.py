"""Lines as JSON lines and event streams have them: they end at \\n or \\r\\n and nowhere else.

``str.splitlines`` and httpx's ``iter_lines`` also break at U+2028, U+0085 and more, which JSON's texts may hold as
they are (RFC 8259, 7).
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from router.openai.json_limits import invalid_json
from workers.engine.errors import InvalidRequest


class LineCutter:
    """Cuts bytes that come piece by piece into lines of text; what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, piece: bytes) -> list[str]:
        """Take more bytes; return the lines that have ended."""
        *whole, self._rest = (self._rest + self._decoder.decode(piece)).split("\n")
        return [_without_return(line) for line in whole]


def file_lines(path: Path, param: str) -> list[str]:
    """All lines of a UTF-8 file, empty ones too, so that their places are their numbers.

    A byte order mark is passed over.

    Raises:
        InvalidRequest: the file cannot be read; ``param`` named it.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param) from None
    return [_without_return(line) for line in text.split("\n")]


def line_value(line: str) -> Any:
    """The JSON value of a line; it can be written as JSON again.

    Raises:
        ValueError: it is none, or none that an endpoint reads: NaN, half a surrogate pair, too many levels.
    """
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        excess = invalid_json(line.encode(), str(error))
        raise ValueError(excess.message if excess.param else f"no JSON: {error}") from None
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:  # 1e999, which the parser takes for infinity
        raise ValueError("no JSON: a number is larger than any that can be sent") from None
    return value


def _without_return(line: str) -> str:
    return line.removesuffix("\r")
