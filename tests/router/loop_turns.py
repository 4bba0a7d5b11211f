"""Whether an event loop runs on while something is under way."""

from __future__ import annotations

import asyncio
import time
from typing import Any


async def longest_turn_s(work: asyncio.Future[Any]) -> float:
    """How long at most the loop's thread computed in one go until ``work`` was done, in seconds of a core.

    By the thread's own clock: other threads and processes may take the cores for as long as they like.
    """
    longest, last_s = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0.001)
        now_s = time.thread_time()
        longest, last_s = max(longest, now_s - last_s), now_s
    return longest
