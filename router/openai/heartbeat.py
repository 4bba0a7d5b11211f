"""Writes the events of a stream, and a comment whenever it has been silent for long.

Proxies cut connections on which nothing moves, and a request may wait for a replica or for its prompt's turn.
A comment (a line that begins with a colon, ignored by clients) keeps them open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from starlette.types import Send

from router.openai import sse

SILENCE_S = 15.0
"""Below the 30 to 60 s after which common proxies give up on a silent connection."""

Sleep = Callable[[float], Awaitable[None]]


class EventWriter:
    """The response of one stream. One task writes events; comments come from a task of its own.

    The headers wait for the first event, so that a request refused meanwhile still gets its status; or for
    the first comment, after which an error can only be an event.
    """

    def __init__(self, send: Send, sleep: Sleep, send_body: Send | None = None) -> None:
        """``send_body`` takes what follows the headers, where layers between us and the server change those alone."""
        self._send = send
        self._send_body = send_body or send
        self._sleep = sleep
        self._is_silent = True
        self._turn = asyncio.Lock()  # neither events nor a comment come before the headers, nor after the end
        self._task: asyncio.Task[None] | None = None
        self.has_begun = False
        """True once the status can no longer change."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None, "the writer was entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def begin(self) -> None:
        """Send the headers, unless a comment has."""
        async with self._turn:
            await self._begin()

    async def write(self, events: bytes) -> None:
        """Send events; after ``begin``."""
        self._is_silent = False
        await self._send_body({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        assert self._task is not None, "the writer was entered"
        async with self._turn:
            self._task.cancel()
            await self._send_body({"type": "http.response.body", "body": events})

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": sse.STREAM_HEADERS})

    async def _beat(self) -> None:
        while True:
            await self._sleep(SILENCE_S)
            if self._is_silent:
                async with self._turn:
                    await self._begin()
                    comment = {"type": "http.response.body", "body": sse.COMMENT, "more_body": True}
                    await self._send_body(comment)
            self._is_silent = True
