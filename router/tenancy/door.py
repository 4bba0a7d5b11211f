"""Who may come in: the middleware that asks for an API key before anything that costs or tells."""

from __future__ import annotations

import base64
import binascii

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from router.tenancy.key_source import KeySource
from router.tenancy.keys import ANYBODY, Tenant

_FOR_ADMINS = ("/metrics", "/ui")
GUARDED = ("/v1/", "/tokenize", "/detokenize", "/load", *_FOR_ADMINS)
"""Beginnings of the paths that ask for a key."""


class DoorMiddleware:
    """Lets requests with a valid key in, and all requests where no keys are set.

    The caller is in ``scope["state"]["tenant"]``. Health, version and the API's description ask for no key.
    """

    def __init__(self, app: ASGIApp, source: KeySource) -> None:
        self._app = app
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ring = self._source.ring()
        tenant: Tenant | None = ANYBODY
        if ring is not None:
            key = _key(scope)
            tenant = ring.find(key) if key else None
        path = scope["path"]
        is_guarded = path.startswith(GUARDED) or _is_deep_health(scope)
        if tenant is None and is_guarded:
            # On /ui a browser asks for a password: that is the key, whatever name stands beside it.
            scheme = b"Basic" if path.startswith("/ui") else b"Bearer"
            await _refuse(send, 401, _missing(scope), "invalid_api_key", scheme)
        elif tenant is not None and not tenant.is_admin and path.startswith(_FOR_ADMINS):
            await _refuse(send, 403, f"{path} needs an admin's key", "not_an_admin")
        else:
            scope.setdefault("state", {})["tenant"] = tenant
            await self._app(scope, receive, send)


def _key(scope: Scope) -> str:
    """The key that a request shows, as a bearer's or as a basic password; empty if it shows none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, rest = value.decode("latin-1").partition(" ")
            if kind.lower() == "bearer":
                return str(rest.strip())
            return _password(rest.strip()) if kind.lower() == "basic" else ""
    return ""


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_deep_health(scope: Scope) -> bool:
    """True if a model is to compute something for the answer."""
    return bool(scope["path"] == "/health" and b"deep" in scope.get("query_string", b""))


def _missing(scope: Scope) -> str:
    if _key(scope):
        return "the API key is not valid here"
    return "no API key was given: send it as 'Authorization: Bearer KEY'"


async def _refuse(send: Send, status: int, message: str, code: str, scheme: bytes = b"") -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = orjson.dumps({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if scheme:
        headers.append((b"www-authenticate", scheme + b' realm="shoal"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
