"""Reads request bodies: bounded in size, then into a model of ``router.openai.schema``."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from router.openai.errors import BodyEncoded, BodyTooLarge, BodyTooSlow, invalid_body
from router.openai.json_limits import check_width, invalid_json
from workers.engine.errors import InvalidRequest

_Body = TypeVar("_Body", bound=BaseModel)
_Understood = TypeVar("_Understood")


DRAINED = 8
"""Times the limit that is still read, and thrown away, of a body that is too long: many clients look at an
answer only when they have sent all."""


MOST_S = 60.0
"""For a body to come whole: the longest that is allowed takes as long at 1 Mbit/s."""


LONG_BYTES = 256 * 1024
"""A body from here on is understood in a thread: 8 MB of numbers take 0.7 s, in steps of at most 0.2 s."""

_LONG_BODIES = ThreadPoolExecutor(1, "long-body")
"""One at a time, since what reads JSON holds the interpreter's lock: of several threads the event loop would be one."""

NARROW_BYTES = 16 * 1024
"""A shorter body cannot hold enough mistakes to matter."""


async def read_body(request: Request, model: type[_Body], max_bytes: int) -> _Body:
    """Read and validate a JSON body, whatever its content type says.

    Raises:
        BodyTooLarge: it is longer than ``max_bytes``; no more than that was kept in memory.
        BodyEncoded: it is compressed.
        BodyTooSlow: it had not come whole after ``MOST_S``.
        InvalidRequest: it is not JSON, or not what ``model`` asks for.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise BodyEncoded(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes * DRAINED:
        raise BodyTooLarge(max_bytes)
    try:
        async with asyncio.timeout(MOST_S):
            body = await _whole(request, max_bytes)
    except TimeoutError:
        raise BodyTooSlow(MOST_S) from None
    return await in_turn(len(body), partial(_understood, body, model))


async def in_turn(num_bytes: int, understand: Callable[[], _Understood]) -> _Understood:
    """What ``understand`` makes of a body of that length: at once, or of a long one in the thread for such."""
    if num_bytes < LONG_BYTES:
        return understand()
    return await asyncio.get_running_loop().run_in_executor(_LONG_BODIES, understand)


def _understood(body: bytes, model: type[_Body]) -> _Body:
    body = body.removeprefix(codecs.BOM_UTF8)  # which JSON lets a reader ignore (RFC 8259, 8.1)
    _check_width(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _wrong(body, error) from None


async def _whole(request: Request, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes <= max_bytes:
            pieces.append(piece)
        else:
            pieces.clear()
            if num_bytes > max_bytes * DRAINED:
                break
    if num_bytes > max_bytes:
        raise BodyTooLarge(max_bytes)
    return b"".join(pieces)


def _wrong(body: bytes, error: ValidationError) -> InvalidRequest:
    try:
        given = from_json(body)
    except ValueError as invalid:
        return invalid_json(body, str(invalid))
    return invalid_body(error, given)


def _check_width(body: bytes) -> None:
    """Refuse what is absurdly wide; whether it is JSON at all is told later."""
    if len(body) <= NARROW_BYTES:
        return
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    check_width(whole)
