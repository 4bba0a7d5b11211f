"""Requests that one more loss would condemn go to replicas one at a time, so that only the guilty one is.

A request that breaks replicas takes those beside it along: all of them have lost as many replicas without a token.
By itself each of the others has its token soon, and is cleared; the one that has not is what breaks them.
"""

from __future__ import annotations

import asyncio


class LastChance:
    """A door for one: the next may pass when the one before has a token or is gone."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.engine_id: str | None = None
        """Who has passed and is neither cleared nor gone."""

    async def enter(self, engine_id: str) -> None:
        """Wait in the order of coming, then pass."""
        await self._lock.acquire()
        self.engine_id = engine_id

    def leave(self, engine_id: str) -> None:
        """It has a token, or is gone. Ids of others are ignored."""
        if self.engine_id == engine_id:
            self.engine_id = None
            self._lock.release()
