"""What surrounds every HTTP request: its id, its count, the capacity that is left, and the answer to a bug."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai.errors import internal_error_object
from router.unread_body import UnreadBody

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")

CountAnswer = Callable[[str, int], None]
Headers = list[tuple[bytes, bytes]]


class EdgeMiddleware:
    """Gives each request an id (the client's own ``X-Request-Id`` if it is a plain word), and counts answers.

    The id is in ``scope["state"]["request_id"]`` and, unless the server before us sends it, in the answer's
    header. An answer before the end of the body leaves nothing of it on the connection (``UnreadBody``). Whatever
    no handler foresaw is logged once with the id and answered with 500. ``scope["state"]["send_body"]`` is the
    server's own ``send``: a streamed token passes through none of the layers, which look at headers alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        count: CountAnswer,
        api_headers: Callable[[Scope], Headers] = lambda scope: [],
        sends_request_id: bool = True,
    ) -> None:
        """``api_headers`` of a request go with its answer if its path is below ``/v1/``."""
        self._app = app
        self._count = count
        self._api_headers = api_headers
        self._sends_request_id = sends_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["send_body"] = send
        status = 499  # nginx's word for a client that left before an answer
        has_begun = False
        body = UnreadBody(scope, receive)

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                headers = [*message.get("headers", ())]
                if not body.is_over and not await body.discard():
                    headers.append((b"connection", b"close"))
                if self._sends_request_id:
                    headers.append((REQUEST_ID, request_id.encode()))
                if scope["path"].startswith("/v1/"):
                    headers += self._api_headers(scope)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, body.receive, send_with_id)
        except Exception:
            log.exception("%s: %s %s failed", request_id, scope["method"], scope["path"])
            if has_begun:
                raise  # the server cuts the connection, which is all that can still be said
            await _answer_500(send_with_id)
        finally:
            route = scope.get("route")
            self._count(getattr(route, "path", "unknown"), status)


async def _answer_500(send: Send) -> None:
    body = orjson.dumps(internal_error_object())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def request_id_of(headers: Headers) -> str:
    """The id that a client gave its request, if it is a plain word; else a new one."""
    for name, value in headers:
        if name == REQUEST_ID and _GOOD_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex
