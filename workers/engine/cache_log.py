"""What has changed in the prefix cache since listeners were last told: the net effect, numbered.

A listener (an ingress) applies each message as stored first, then offloaded, then evicted. Only net changes are
kept: a hash that was evicted and stored again between two messages never shows, so that order is always right.
"""

from __future__ import annotations

from typing import Final

from workers.engine.outputs import CacheEvents, CacheSnapshot

DEVICE: Final = 1
HOST: Final = 2
"""Tiers, as bits: a content may be in both. Plain numbers, since an ``IntFlag`` takes a microsecond an operation."""


class CacheLog:
    """Where each hash is, and what has changed between two ``drain`` calls."""

    __slots__ = ("_next_sequence", "_tiers", "_told")

    def __init__(self) -> None:
        self._next_sequence = 0
        self._tiers: dict[bytes, int] = {}
        self._told: dict[bytes, int] = {}
        """Of hashes that have changed: where listeners believe them to be. Who never drains has an entry a block."""

    @property
    def num_changed(self) -> int:
        """Hashes that the next ``drain`` looks at."""
        return len(self._told)

    def stored(self, block_hash: bytes, tier: int = DEVICE) -> None:
        """A hash that was absent from ``tier`` can now be found there."""
        before = self._tiers.get(block_hash, 0)
        self._tiers[block_hash] = before | tier
        self._note(block_hash, before, before | tier)

    def evicted(self, block_hash: bytes, tier: int = DEVICE) -> None:
        """A hash that was present in ``tier`` can no longer be found there."""
        before = self._tiers[block_hash]
        now = before & ~tier
        if now:
            self._tiers[block_hash] = now
        else:
            del self._tiers[block_hash]
        self._note(block_hash, before, now)

    def _note(self, block_hash: bytes, before: int, now: int) -> None:
        """Keep a change; one that takes back an earlier one leaves nothing to tell."""
        if self._told.setdefault(block_hash, before) == now:
            del self._told[block_hash]

    def drain(self) -> CacheEvents | None:
        """Hand out and forget what was collected; None if nothing changed."""
        stored: list[bytes] = []
        offloaded: list[bytes] = []
        evicted: list[bytes] = []
        for block_hash, told in self._told.items():
            now = self._tiers.get(block_hash, 0)
            if now & DEVICE:
                if not told & DEVICE:
                    stored.append(block_hash)
            elif now & HOST:
                if told != HOST:
                    offloaded.append(block_hash)
            elif told:
                evicted.append(block_hash)
        self._told.clear()
        num_events = len(stored) + len(offloaded) + len(evicted)
        if not num_events:
            return None
        events = CacheEvents(self._next_sequence, stored, evicted, offloaded)
        self._next_sequence += num_events
        return events

    def snapshot(self) -> CacheSnapshot:
        """The cache as of the last ``drain``, so that the next events apply on top of it."""
        device: list[bytes] = []
        host: list[bytes] = []
        for block_hash, tier in (self._tiers | self._told).items():
            if tier & DEVICE:
                device.append(block_hash)
            elif tier:
                host.append(block_hash)
        return CacheSnapshot(self._next_sequence, device, host)
