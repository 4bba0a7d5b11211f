"""The rest of a request that is answered before its body has come.

A proxy may forget what it had still to send once it has the answer, and use the connection for the next client:
the server would take that one's request for the rest of this body. So the rest is read before an early answer,
or, where it is long or slow, the connection is closed with the answer.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

MOST_BYTES = 1 << 20
"""Of a rest that is worth reading; beyond it a new connection is cheaper."""
MOST_S = 1.0
"""How long the rest may take."""


class UnreadBody:
    """Stands between server and application and knows whether the body has come whole."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.is_over = not _announces_body(scope)
        """True once nothing of the body is left to come."""

    async def receive(self) -> Message:
        """The next message, for the application."""
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.is_over = True
        return message

    async def discard(self) -> bool:
        """Read what is left and throw it away.

        Returns:
            False if it is too much or too slow: something is still to come.
        """
        num_bytes = 0
        try:
            async with asyncio.timeout(MOST_S):
                while not self.is_over and num_bytes <= MOST_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass
        return self.is_over


def _announces_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in scope["headers"]
    )
