"""Stop strings, found while text arrives in pieces of any size.

Characters only. What is let out never depends on how the text was cut into pieces: a match is the stop
string that *ends* first in the whole text (of those that end together, the longest), and text that may
still become part of one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one output for its stop strings."""

    __slots__ = ("_held", "_include", "_longest", "_prefixes", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:i] for stop in stops for i in range(1, len(stop)))
        self._longest = max((len(stop) for stop in stops), default=0)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string found; from then on all text is swallowed."""

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown now, up to a stop string if one is complete."""
        if self.matched is not None or not text:
            return ""
        pending = self._held + text
        best_end, best_start = len(pending) + 1, 0
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0 and (start + len(stop), start) < (best_end, best_start):
                best_end, best_start = start + len(stop), start
        if best_end <= len(pending):
            self.matched = pending[best_start:best_end]
            self._held = ""
            return pending[: best_end if self._include else best_start]
        held = self._num_held(pending)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """Text held back when the output has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that a stop string could begin with."""
        prefixes = self._prefixes
        for length in range(min(self._longest - 1, len(pending)), 0, -1):
            if pending[-length:] in prefixes:
                return length
        return 0
