"""Stop strings, found while text arrives in pieces of any size.

Characters only. What is let out never depends on how the text was cut into pieces: a match is the stop
string that *ends* first in the whole text (of those that end together, the longest), and text that may
still become part of one is held back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class StopStrings:
    """The stop strings of one request, shared by all its choices; takes no more room than the strings do."""

    __slots__ = ("_sorted", "longest")

    def __init__(self, stops: Iterable[str]) -> None:
        self._sorted = sorted(set(stops))
        assert all(self._sorted), "an empty stop string matches everywhere"
        self.longest = max(map(len, self._sorted), default=0)

    def first_match(self, text: str, num_old: int) -> tuple[int, int] | None:
        """Start and end of the stop string that ends first, if none ends within the first ``num_old`` characters."""
        best: tuple[int, int] | None = None
        for stop in self._sorted:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = start, start + len(stop)
        return best

    def num_begun(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string could begin with.

        Ends are tried from the longest on. Whoever keeps just that end, and asks again with more text behind it,
        causes one failed try for each character given up, hence one a character in all.
        """
        for length in range(min(self.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            place = bisect_left(self._sorted, end)  # strings that begin with ``end`` would stand from here on
            if place < len(self._sorted) and self._sorted[place].startswith(end):
                return length
        return 0


class StopMatcher:
    """Watches one output for its request's stop strings."""

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string found; from then on all text is swallowed."""

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown now, up to a stop string if one is complete."""
        if self.matched is not None or not text:
            return ""
        pending = self._held + text
        found = self._stops.first_match(pending, len(self._held))
        if found is not None:
            start, end = found
            self.matched = pending[start:end]
            self._held = ""
            return pending[: end if self._include else start]
        cut = len(pending) - self._stops.num_begun(pending)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """Text held back when the output has ended without a match."""
        held, self._held = self._held, ""
        return held
