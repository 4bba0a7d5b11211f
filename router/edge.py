"""What surrounds every HTTP request: its id, and the count of answers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")

CountAnswer = Callable[[str, int], None]


class EdgeMiddleware:
    """Gives each request an id (the client's own ``X-Request-Id`` if it is a plain word), and counts answers.

    The id is in ``scope["state"]["request_id"]`` and in the answer's header. Plain ASGI: a streamed token
    passes through one function call.
    """

    def __init__(self, app: ASGIApp, count: CountAnswer) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 499  # nginx's word for a client that left before an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (REQUEST_ID.encode(), request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            self._count(getattr(route, "path", "unknown"), status)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID.encode() and _GOOD_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex
