"""The layer next to the HTTP server, outside Ray Serve's own: what Serve and uvicorn answer takes the API's form here.

Ray Serve puts it there in all of its HTTP servers if ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names
``router.outer_layer:middlewares``.
"""

from __future__ import annotations

import orjson
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.openai.errors import foreign_error_object

_MOST_BYTES = 4096
"""Of a message that is put into an error object."""
LOST = "the HTTP process ended before it answered: try again"
"""HAProxy's words for the same (``deploy/haproxy_errors.cfg``)."""
_SERVES_OWN = "/-/"
"""Paths at which proxies ask Ray Serve how it is."""


def middlewares() -> list[Middleware]:
    """What Ray Serve asks for."""
    return [Middleware(OuterLayer)]


class OuterLayer:
    """Turns errors in plain text into error objects, and streams to HTTP/1.0 clients into bodies that such can read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and not scope["path"].startswith(_SERVES_OWN):
            if scope["http_version"] == "1.0":
                send = unchunked(send)
            answer = _InTheApisForm(send, scope["path"])
            try:
                await self._app(scope, receive, answer.send)
            finally:
                await answer.end()
            return
        await self._app(scope, receive, send)


class _InTheApisForm:
    """Holds an error in plain text back until it is whole, and says what was never said."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._held: Message | None = None
        self._told = b""
        self._has_begun = False

    async def end(self) -> None:
        """Answer if nobody has: Serve does not where the process that had the request is lost, nor does what breaks.

        uvicorn's own answer to that would be a plain 500, past this layer. Who has left is sent nothing.
        """
        if not self._has_begun:
            await self._error(502, LOST, [])

    async def send(self, message: Message) -> None:
        if self._held is not None:
            await self._finish(self._held, message)
        elif message["type"] == "http.response.start" and _is_plain_error(message):
            self._held = message
        else:
            self._has_begun = True
            await self._send(message)

    async def _finish(self, start: Message, message: Message) -> None:
        self._told = (self._told + message.get("body", b""))[:_MOST_BYTES]
        if message.get("more_body", False):
            return
        self._held = None
        status, told = start["status"], self._told.decode("utf-8", "replace")
        kept = [one for one in start["headers"] if one[0].lower() not in (b"content-type", b"content-length")]
        if status == 404 and self._path.startswith("/"):
            # Our application takes all paths and says by itself what it does not serve: Serve has none yet.
            status, told = 503, "no HTTP process is there yet: try again"
            kept.append((b"retry-after", b"1"))
        await self._error(status, told, kept)

    async def _error(self, status: int, told: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        body = orjson.dumps(foreign_error_object(status, told))
        own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})
        await self._send({"type": "http.response.body", "body": body})


def _is_plain_error(start: Message) -> bool:
    kind = next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")
    return int(start["status"]) >= 400 and bytes(kind).startswith(b"text/plain")


def unchunked(send: Send) -> Send:
    """``send`` of a request that came as HTTP/1.0, whose client knows no chunks (RFC 9112, 6.1).

    uvicorn with httptools sends chunks nevertheless wherever no length is known. Its own account of the answer is
    made to say that there are none: the body then ends with the connection. Another server's ``send`` is left as it is.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return send
    is_unbounded = False

    async def send_plain(message: Message) -> None:
        nonlocal is_unbounded
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            is_unbounded = not any(name.lower() == b"content-length" for name, _ in headers)
            if is_unbounded:
                cycle.chunked_encoding = False
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        elif is_unbounded:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
