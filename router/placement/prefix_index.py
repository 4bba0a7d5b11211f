"""Which replica holds which blocks: sets of chained block hashes, kept current by the replicas' own events.

Hashes only; knows no tokens, no sockets, no clock. A hash covers everything before its block, and engines
free a chain's tail first, so what a replica holds of a chain is a prefix of it. ``match`` relies on that:
it halves its way to the first missing block instead of looking at each. Should an engine ever keep a block
beyond a hole, the answer is an estimate that is off, never a wrong result.

A pair of replica and block takes about 100 bytes (a 16-byte ``bytes`` object and its place in a set), a
replica 60 kB more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from router.placement.hash_set import HashSet
from workers.engine.block_hash import HASH_BYTES

SNAPSHOT_PART = 4096
"""Hashes taken over between two yields: about 1 ms, so an event loop stays responsive."""


class PrefixIndex:
    """Block hashes held by each replica; events are applied in order or not at all.

    A replica is *current* from its snapshot on, until a gap in the numbers of its events is seen. While it
    is not, what was known stays in use, as an estimate.
    """

    def __init__(self, max_hashes: int = 8_000_000) -> None:
        self._held: dict[str, HashSet] = {}
        self._next_sequence: dict[str, int] = {}
        self._retired: deque[HashSet] = deque()
        self._num_hashes = 0
        self._max_hashes = max_hashes
        self.num_dropped = 0
        """Stored blocks that were not noted because the index was full."""

    @property
    def num_hashes(self) -> int:
        """Pairs of replica and block in the index."""
        return self._num_hashes

    def num_hashes_of(self, replica_id: str) -> int:
        """Blocks that ``replica_id`` is known to hold."""
        return len(self._held.get(replica_id, ()))

    def is_current(self, replica_id: str) -> bool:
        """True from a snapshot on until a gap."""
        return replica_id in self._next_sequence

    def apply(self, replica_id: str, first_sequence: int, stored: bytes, evicted: bytes) -> bool:
        """Apply one message of events: first stored, then evicted, 16 bytes each.

        Returns:
            False if events before ``first_sequence`` are missing: nothing was changed, and nothing more will
            be until the next snapshot. True otherwise, also while a snapshot is awaited.
        """
        expected = self._next_sequence.get(replica_id)
        if expected is None:
            return True
        if first_sequence != expected:
            del self._next_sequence[replica_id]
            return False
        held = self._held[replica_id]
        before = len(held)
        if stored:
            fresh = _split(stored)
            room = self._max_hashes - self._num_hashes
            if len(fresh) > room:
                self.num_dropped += len(fresh) - room
                fresh = fresh[:room]
            held.add_all(fresh)
        if evicted:
            held.discard_all(_split(evicted))
        self._num_hashes += len(held) - before
        self._next_sequence[replica_id] = expected + (len(stored) + len(evicted)) // HASH_BYTES
        self.sweep()
        return True

    def load_snapshot(self, replica_id: str, next_sequence: int, hashes: bytes) -> Iterator[None]:
        """Replace what is known of a replica, in parts of about a millisecond; run it to its end.

        The old state answers until the last part; apply no events of this replica meanwhile.
        """
        fresh = HashSet()
        room = self._max_hashes - self._num_hashes + self.num_hashes_of(replica_id)
        for start in range(0, len(hashes), SNAPSHOT_PART * HASH_BYTES):
            part = _split(hashes[start : start + SNAPSHOT_PART * HASH_BYTES])
            taken = part[: max(0, room - len(fresh))]
            self.num_dropped += len(part) - len(taken)
            fresh.add_all(taken)
            yield
        self._retire(replica_id)
        self._held[replica_id] = fresh
        self._num_hashes += len(fresh)
        self._next_sequence[replica_id] = next_sequence

    def await_snapshot(self, replica_id: str) -> None:
        """Ignore events of a replica until its next snapshot: the stream to it is new."""
        self._next_sequence.pop(replica_id, None)

    def remove(self, replica_id: str) -> None:
        """Forget a replica at once; its memory is given back by later calls of ``sweep``."""
        self._retire(replica_id)
        self._next_sequence.pop(replica_id, None)

    def match(self, replica_id: str, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks of the chain that ``replica_id`` holds."""
        held = self._held.get(replica_id)
        if not held or not hashes:
            return 0
        parts, first = held.parts, hashes[0]
        if first not in parts[first[0]]:
            return 0
        found, end = 1, len(hashes)  # the first missing block is in found..end
        while found < end:
            middle = (found + end) // 2
            block_hash = hashes[middle]
            if block_hash in parts[block_hash[0]]:
                found = middle + 1
            else:
                end = middle
        return found

    def sweep(self) -> None:
        """Free a part of what is forgotten, so that no call stalls on a large replica."""
        if self._retired and not self._retired[0].drop():
            self._retired.popleft()

    def check(self) -> None:
        """Raise ``AssertionError`` if counts and contents disagree."""
        assert self._num_hashes == sum(map(len, self._held.values())), "hashes are miscounted"
        assert self._num_hashes <= self._max_hashes, "the index outgrew its bound"
        assert self._next_sequence.keys() <= self._held.keys(), "a replica is current but holds no set"
        for held in self._held.values():
            assert all(len(h) == HASH_BYTES for h in islice(held, 64)), "a hash has a wrong length"

    def _retire(self, replica_id: str) -> None:
        held = self._held.pop(replica_id, None)
        if held:
            self._num_hashes -= len(held)
            self._retired.append(held)


def _split(hashes: bytes) -> list[bytes]:
    """Cut concatenated digests apart."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
