"""Which replica holds which blocks, and in which tier: chained block hashes, kept by the replicas' own events.

Hashes only; knows no tokens, no sockets, no clock. A hash covers everything before its block, and engines
free a chain's tail first, so what a device holds of a chain is a prefix of it. ``match`` relies on that: it halves
its way to the first missing block instead of looking at each. Should an engine ever keep a block beyond a hole, the
answer is an estimate that is off, never a wrong result. What host memory holds of the rest does have holes, blocks
that a device handed out before they were copied: there it looks at each. Those behind that are on the device count
as on the host too: tails are copied before heads.

A pair of replica and block takes about 110 bytes (a 16-byte ``bytes`` object and its place in a dict), a
replica 20 kB more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from router.placement.tier_map import TierMap
from workers.engine.block_hash import HASH_BYTES
from workers.engine.cache_log import DEVICE, HOST

BYTES_PER_HASH = 110
"""Of a pair of replica and block, as measured."""
SNAPSHOT_PART = 4096
"""Hashes taken over between two yields: about 1 ms, so an event loop stays responsive."""


MOST_WALKED = 1024
"""Blocks in host memory that a look-up goes through one by one, 0.1 ms; beyond, it halves its way."""


class PrefixIndex:
    """Block hashes held by each replica; events are applied in order or not at all.

    A replica is *current* from its snapshot on, until a gap in the numbers of its events is seen. While it
    is not, what was known stays in use, as an estimate.
    """

    def __init__(self, max_hashes: int = 8_000_000) -> None:
        self._held: dict[str, TierMap] = {}
        self._next_sequence: dict[str, int] = {}
        self._retired: deque[TierMap] = deque()
        self._num_hashes = 0
        self._max_hashes = max_hashes
        self.num_dropped = 0
        """Stored blocks that were not noted because the index was full."""

    @property
    def max_hashes(self) -> int:
        """Beyond these, blocks are not noted."""
        return self._max_hashes

    @property
    def num_hashes(self) -> int:
        """Pairs of replica and block in the index."""
        return self._num_hashes

    def num_hashes_of(self, replica_id: str) -> int:
        """Blocks that ``replica_id`` is known to hold, on its device or in host memory."""
        return len(self._held.get(replica_id, ()))

    def is_current(self, replica_id: str) -> bool:
        """True from a snapshot on until a gap."""
        return replica_id in self._next_sequence

    def apply(
        self, replica_id: str, first_sequence: int, stored: bytes, evicted: bytes, offloaded: bytes = b""
    ) -> bool:
        """Apply one message of events, 16 bytes each.

        Args:
            replica_id: whose events these are.
            first_sequence: number of the first of them.
            stored: now on the device.
            evicted: now nowhere; the last to be applied.
            offloaded: now in host memory alone; applied after ``stored``.

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
            self._put(held, stored, DEVICE, before)
        if offloaded:
            self._put(held, offloaded, HOST, before)
        if evicted:
            held.discard_all(_split(evicted))
        self._num_hashes += len(held) - before
        self._next_sequence[replica_id] = (
            expected + (len(stored) + len(offloaded) + len(evicted)) // HASH_BYTES
        )
        self.sweep()
        return True

    def load_snapshot(
        self, replica_id: str, next_sequence: int, hashes: bytes, host_hashes: bytes = b""
    ) -> Iterator[None]:
        """Replace what is known of a replica, in parts of about a millisecond; run it to its end.

        The old state answers until the last part; apply no events of this replica meanwhile.

        Args:
            replica_id: whose blocks these are.
            next_sequence: number of the first event after the snapshot.
            hashes: on the device, 16 bytes each.
            host_hashes: in host memory alone.
        """
        fresh = TierMap()
        before = self.num_hashes_of(replica_id)
        for packed, tier in ((hashes, DEVICE), (host_hashes, HOST)):
            for start in range(0, len(packed), SNAPSHOT_PART * HASH_BYTES):
                self._put(fresh, packed[start : start + SNAPSHOT_PART * HASH_BYTES], tier, before)
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

    def match(self, replica_id: str, hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many leading blocks of the chain are on ``replica_id``'s device, and how many after them on its host."""
        held = self._held.get(replica_id)
        if held is None:
            return 0, 0
        parts = held.parts
        num_device = _first_missing(parts, hashes, 0, DEVICE)
        walked = min(num_device + MOST_WALKED, len(hashes))
        for place in range(num_device, walked):
            block_hash = hashes[place]
            if block_hash not in parts[block_hash[0]]:
                return num_device, place - num_device
        return num_device, _first_missing(parts, hashes, walked, DEVICE | HOST) - num_device

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
            for block_hash, tier in islice(held, 64):
                assert len(block_hash) == HASH_BYTES, "a hash has a wrong length"
                assert tier in (DEVICE, HOST), "a hash is nowhere"

    def _put(self, held: TierMap, packed: bytes, tier: int, num_counted: int) -> None:
        """Note blocks in a tier, as far as there is room; ``num_counted`` of those in ``held`` are counted so far."""
        room = self._max_hashes - self._num_hashes - (len(held) - num_counted)
        self.num_dropped += held.put_all(_split(packed), tier, room)

    def _retire(self, replica_id: str) -> None:
        held = self._held.pop(replica_id, None)
        if held:
            self._num_hashes -= len(held)
            self._retired.append(held)


def _first_missing(parts: Sequence[dict[bytes, int]], hashes: Sequence[bytes], start: int, tiers: int) -> int:
    """Place, from ``start`` on, of the first hash that is in none of ``tiers``, as if those that are were a prefix."""
    end = len(hashes)
    if start == end or not parts[hashes[start][0]].get(hashes[start], 0) & tiers:
        return start
    found = start + 1  # the first missing one is in found..end
    while found < end:
        middle = (found + end) // 2
        block_hash = hashes[middle]
        if parts[block_hash[0]].get(block_hash, 0) & tiers:
            found = middle + 1
        else:
            end = middle
    return found


def _split(hashes: bytes) -> list[bytes]:
    """Cut concatenated digests apart."""
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
