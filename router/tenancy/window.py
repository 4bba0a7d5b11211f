"""How much was used in the last minute. Pure: the time comes in.

A sliding window, not a bucket: whatever minute one looks at, no more than the limit was admitted in it, and a
caller may use the minute's limit all at once. Uses are kept by the second, so that memory does not grow with them.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 60


class Window:
    """Amounts used, by the second."""

    __slots__ = ("_cells", "_total")

    def __init__(self) -> None:
        self._cells: deque[tuple[int, float]] = deque()
        self._total = 0.0

    def used(self, now_s: float) -> float:
        """The amount used in the last minute."""
        self._forget(now_s)
        return self._total

    def add(self, amount: float, now_s: float) -> None:
        """Count ``amount`` as used now."""
        self._forget(now_s)
        second = math.floor(now_s)
        if self._cells and self._cells[-1][0] >= second:
            last, before = self._cells.pop()
            self._cells.append((last, before + amount))
        else:
            self._cells.append((second, amount))
        self._total += amount

    def reset_s(self, now_s: float) -> float:
        """Seconds until nothing counts as used any more."""
        self._forget(now_s)
        return self._cells[-1][0] + 1 + WINDOW_S - now_s if self._cells else 0.0

    def wait_s(self, amount: float, limit: float, now_s: float) -> float:
        """Seconds until ``amount`` more is within ``limit``: 0 now, infinite never.

        What exceeds the limit by itself passes when nothing else has been used: refusing it for ever would tell
        the caller nothing that waiting can mend.
        """
        self._forget(now_s)
        excess = self._total + min(amount, limit) - limit
        if excess <= 0:
            return 0.0
        for second, used in self._cells:
            excess -= used
            if excess <= 0:
                return max(second + 1 + WINDOW_S - now_s, 0.001)
        return math.inf

    def _forget(self, now_s: float) -> None:
        while self._cells and self._cells[0][0] + 1 + WINDOW_S <= now_s:
            self._total -= self._cells.popleft()[1]
        if not self._cells:
            self._total = 0.0  # no dust of subtractions is left
