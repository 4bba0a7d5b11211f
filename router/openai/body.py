"""Reads request bodies: bounded in size, then into a model of ``router.openai.schema``."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from router.openai.errors import BodyTooLarge, invalid_body

_Body = TypeVar("_Body", bound=BaseModel)


DRAINED = 8
"""Times the limit that is still read, and thrown away, of a body that is too long: many clients look at an
answer only when they have sent all."""


async def read_body(request: Request, model: type[_Body], max_bytes: int) -> _Body:
    """Read and validate a JSON body, whatever its content type says.

    Raises:
        BodyTooLarge: it is longer than ``max_bytes``; no more than that was kept in memory.
        InvalidRequest: it is not JSON, or not what ``model`` asks for.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes * DRAINED:
        raise BodyTooLarge(max_bytes)
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
    try:
        return model.model_validate_json(b"".join(pieces))
    except ValidationError as error:
        raise invalid_body(error) from None
