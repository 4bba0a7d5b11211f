"""What a client asks for in headers of its request rather than in the body."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.errors import InvalidRequest

_SESSION = re.compile(r"[!-~]{0,256}")
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class HeaderWishes:
    """Wishes that go with any kind of generation."""

    is_explained: bool
    """The answer also says why it went where it went."""
    session: str
    """Requests of one session gather at one replica; empty: it belongs to none."""


def header_wishes(headers: Iterable[tuple[bytes, bytes]]) -> HeaderWishes:
    """The wishes of a request's headers, whose names are in lower case.

    Raises:
        InvalidRequest: one of them cannot be what was meant.
    """
    found: dict[bytes, list[str]] = {b"x-shoal-explain": [], b"x-session-id": []}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1").strip())
    return HeaderWishes(_switch(found[b"x-shoal-explain"]), _session(found[b"x-session-id"]))


def _switch(values: list[str]) -> bool:
    if len(values) > 1 or (values and values[0].lower() not in _SWITCH):
        raise InvalidRequest(
            f"the header X-Shoal-Explain is {', '.join(values)[:80]!r}, it takes 1 or 0", "X-Shoal-Explain"
        )
    return bool(values) and _SWITCH[values[0].lower()]


def _session(values: list[str]) -> str:
    if len(values) > 1 or (values and not _SESSION.fullmatch(values[0])):
        raise InvalidRequest(
            "the header X-Session-Id must come once and have 1 to 256 printable ASCII characters without spaces",
            "X-Session-Id",
        )
    return values[0] if values else ""
