"""Where texts become tokens: short ones at once, long ones in threads, very long ones one after the other.

The library lets other threads run meanwhile, but what stands around it does not: a list of a million ids is made and
freed in tens of milliseconds each. One very long text at a time bounds that, the memory, and the cores it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.text.tokenizer import LONG_TEXT_CHARS
from workers.engine.errors import InvalidRequest

VERY_LONG_TEXT_CHARS = 16 * LONG_TEXT_CHARS
"""From here on one text at a time in a process: about 40 ms of work."""

_T = TypeVar("_T")


class Tokenizing:
    """Runs the tokenizing of all models of an ingress."""

    def __init__(self, max_unbounded_chars: int) -> None:
        """``max_unbounded_chars``: see ``Limits``."""
        self._max_unbounded_chars = max_unbounded_chars
        self._one_by_one = ThreadPoolExecutor(1, "tokenize")

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """What ``work`` gives, which tokenizes ``size`` characters, or a conversation of so many bytes."""
        if size < LONG_TEXT_CHARS:
            return work()
        if size < VERY_LONG_TEXT_CHARS:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._one_by_one, work)

    def check_unbounded(self, num: int, param: str, unit: str = "characters") -> None:
        """Refuse what is too long where any number of tokens would do; it has ``num`` of ``unit``.

        Raises:
            InvalidRequest: it is.
        """
        if num > self._max_unbounded_chars:
            raise InvalidRequest(
                f"{param}: {num} {unit} to convert or to truncate, the limit is "
                f"{self._max_unbounded_chars}: send less, or several requests",
                param,
            )

    def close(self) -> None:
        """Begin no more of the very long ones. Safe to call twice."""
        self._one_by_one.shutdown(wait=False, cancel_futures=True)
