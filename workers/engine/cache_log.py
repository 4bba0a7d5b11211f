"""What has changed in the prefix cache since listeners were last told: the net effect, numbered.

A listener (an ingress) applies each message as stored first, evicted second. Only net changes are kept: a
hash that was evicted and stored again between two messages never shows, so that order is always right.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.outputs import CacheEvents, CacheSnapshot


class CacheLog:
    """Collects stored and evicted hashes between two ``drain`` calls."""

    __slots__ = ("_evicted", "_next_sequence", "_stored")

    def __init__(self) -> None:
        self._next_sequence = 0
        self._stored: dict[bytes, None] = {}  # dicts, because they keep order and forget in O(1)
        self._evicted: dict[bytes, None] = {}

    def stored(self, block_hash: bytes) -> None:
        """A hash that was absent can now be found."""
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None

    def evicted(self, block_hash: bytes) -> None:
        """A hash that was present can no longer be found."""
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def drain(self) -> CacheEvents | None:
        """Hand out and forget what was collected; None if nothing changed."""
        if not self._stored and not self._evicted:
            return None
        events = CacheEvents(self._next_sequence, list(self._stored), list(self._evicted))
        self._next_sequence += len(self._stored) + len(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return events

    def snapshot(self, present: Iterable[bytes]) -> CacheSnapshot:
        """The cache as of the last ``drain``, so that the next events apply on top of it.

        Args:
            present: the hashes that can be found now.
        """
        hashes = [block_hash for block_hash in present if block_hash not in self._stored]
        return CacheSnapshot(self._next_sequence, [*hashes, *self._evicted])
