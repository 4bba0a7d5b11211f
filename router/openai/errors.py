"""Errors as OpenAI's error objects: one table decides status, type and code."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.openai.json_limits import JsonPath, spelled
from workers.engine.errors import (
    Forbidden,
    GrammarNotFollowed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RateLimited,
    ReplicaLost,
    ShoalError,
    ShuttingDown,
    UnknownModel,
    UserError,
)


class _Row(NamedTuple):
    status: int
    type: str
    code: str | None


_TABLE: Mapping[type[ShoalError], _Row] = {
    PromptTooLong: _Row(400, "invalid_request_error", "context_length_exceeded"),
    UnknownModel: _Row(404, "invalid_request_error", "model_not_found"),
    GrammarNotFollowed: _Row(400, "grammar_too_complex", "grammar_too_complex"),
    InvalidRequest: _Row(400, "invalid_request_error", None),
    Forbidden: _Row(403, "invalid_request_error", "forbidden"),
    RateLimited: _Row(429, "rate_limit_error", "rate_limit_exceeded"),
    UserError: _Row(400, "invalid_request_error", None),
    Overloaded: _Row(429, "rate_limit_error", "overloaded"),
    ReplicaLost: _Row(503, "server_error", "no_replica"),
    ShuttingDown: _Row(503, "server_error", "shutting_down"),
    ShoalError: _Row(500, "server_error", None),
}

_HTTP_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
    415: "unsupported_encoding",
}


class BodyTooLarge(HTTPException):
    """The body is longer than the limit; it was not read to its end."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            413,
            f"the body is longer than {limit_bytes} bytes, the limit here: send less",
            {"connection": "close"},
        )


class BodyTooSlow(HTTPException):
    """The body did not come in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            408, f"the body had not come whole after {limit_s:g} s, the limit here", {"connection": "close"}
        )


class BodyEncoded(HTTPException):
    """The body is compressed; it was not read."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            415,
            f"Content-Encoding {encoding[:80]!r} is not taken: send the body as it is, without that header",
            {"accept-encoding": "identity"},
        )


class NotStored(HTTPException):
    """A response was asked for by its id; none is kept."""

    def __init__(self, response_id: str) -> None:
        super().__init__(404, f"response {response_id[:80]!r} is not kept here: responses are not stored")


class RequestNotKnown(HTTPException):
    """A request was asked for by its id; no ingress knows it, or it is another key's."""

    def __init__(self, request_id: str, kept_s: float) -> None:
        super().__init__(
            404,
            f"no request {request_id[:80]!r} of this key is known: give the id of its answer or its x-request-id, "
            f"within {kept_s / 60:g} minutes of its end and while the ingress that ran it lives",
        )


UNAVAILABLE_RETRY_S = 10
"""When to come back where no replica is there: a lost one is back after some 6 s, one that starts anew takes longer."""


def error_object(error: ShoalError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error that Shoal raised on purpose."""
    row = next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)
    param = error.param if isinstance(error, UserError) else None
    return row.status, _body(str(error), row.type, param, row.code)


def foreign_error_object(status: int, message: str) -> dict[str, Any]:
    """Body of an error that Ray Serve or another layer around us answers, which says it as plain text."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _body(message, kind, None, "no_ingress" if status in (502, 503, 504) else _HTTP_CODES.get(status))


def retry_after(error: ShoalError) -> int | None:
    """Seconds after which the same request may pass; None if waiting does not help."""
    if isinstance(error, Overloaded):
        return max(1, round(error.retry_after_s))
    return UNAVAILABLE_RETRY_S if isinstance(error, ReplicaLost | ShuttingDown) else None


def internal_error_object() -> dict[str, Any]:
    """Body of an error that nobody foresaw; details are in the log only."""
    return _body("internal error", "server_error", None, None)


def invalid_body(error: ValidationError, given: object = None) -> InvalidRequest:
    """The first thing that is wrong with a body, in words, with the field at fault.

    Args:
        given: the body as it came, to tell its fields from pydantic's names of what a field may be; None: not
            known, and the path is taken as pydantic has it.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"], given, is_missing=first["type"] == "missing")
    param = spelled(path)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param}: this field is not supported", param)
    if param is not None and first["input"] is None and first["type"] != "value_error":
        return InvalidRequest(f"{param}: {_null(path)}", param)
    if param is None and first["type"] == "value_error":
        return InvalidRequest(message)
    if param is None:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}", param)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(body), status, headers, "application/json")


async def answer_shoal_error(request: Request, error: Exception) -> Response:
    """Answer for anything Shoal raised before the response began."""
    assert isinstance(error, ShoalError)
    status, body = error_object(error)
    retry_after_s = retry_after(error)
    return json_response(body, status, None if retry_after_s is None else {"retry-after": str(retry_after_s)})


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer for unknown routes and methods, and bodies too large."""
    assert isinstance(error, HTTPException)
    message = error.detail
    named = _NAMED.get(type(error))
    if error.status_code == 404 and named is None:
        message = _unknown(request)
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = named or _HTTP_CODES.get(error.status_code)
    body = _body(message, kind, None, code)
    return json_response(body, error.status_code, error.headers)


async def answer_bad_query(request: Request, error: Exception) -> Response:
    """Answer for a query parameter that is not what the route asks for."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return json_response(_body(f"{param}: {first['msg'].lower()}", "invalid_request_error", param, None), 400)


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client left while it was sending its body; nginx's status, for the counters only."""
    return Response(status_code=499)


_INSTEAD = {
    "/v1/batches": "a file of requests is answered by the command `shoal run-batch`",
    "/v1/files": "a file of requests is answered by the command `shoal run-batch`",
}
"""What does here what some of OpenAI's endpoints do."""


def _unknown(request: Request) -> str:
    """That there is no such path, and what there is in its place."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    pages = {route.path for route in routes if not route.include_in_schema}
    parts = {one for one in pages if any(one.startswith(f"{page}/") for page in pages)}  # of a page's own
    served = sorted({route.path for route in routes} - parts)
    told = f"unknown URL {path[:200]}: "
    instead = next((words for start, words in _INSTEAD.items() if path.startswith(start)), None)
    if instead is not None:
        return told + instead
    if nearest := difflib.get_close_matches(path[:200], served, 1, 0.8):
        return f"{told}did you mean {nearest[0]}?"
    return f"{told}served are {', '.join(served)}"


_NAMED = {NotStored: "response_not_found", RequestNotKnown: "request_not_found"}
"""Codes of errors that say something of their own where the status alone would not."""


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _null(path: JsonPath) -> str:
    """What is wrong with null where it does not mean that a field is absent."""
    return "field required" if len(path) == 1 else "must not be null"


def _path(loc: Sequence[int | str], given: object, *, is_missing: bool) -> JsonPath:
    """pydantic's ``loc`` without the names that it gives to the forms of a field ("<one>", "bool", "[key]").

    ``is_missing``: the last part names a field that is not there.
    """
    if given is None:
        return tuple(part for part in loc if isinstance(part, int) or not part.startswith("<"))
    path: list[str | int] = []
    value: Any = given
    for number, part in enumerate(loc, start=1):
        if isinstance(value, dict) and isinstance(part, str):
            if part in value or (is_missing and number == len(loc)):
                path.append(part)
                value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path.append(part)
            value = value[part] if part < len(value) else None
    return tuple(path)
