"""A set of block hashes whose growth never stalls its owner: many small sets, one by a hash's first byte.

A Python set of a million entries rehashes all of them in one call when it grows (25 to 30 ms measured, longer
than an ingress's event loop may pause). Hashes are uniform, so 256 parts grow at different moments, 4,000
entries each at a million (0.1 ms).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

_NUM_PARTS = 256


class HashSet:
    """Distinct non-empty ``bytes`` of uniform first byte."""

    __slots__ = ("_num_hashes", "parts")

    def __init__(self) -> None:
        self.parts: list[set[bytes]] = [set() for _ in range(_NUM_PARTS)]
        """By first byte. To be read by callers that cannot afford a method call; changed here alone."""
        self._num_hashes = 0

    def __len__(self) -> int:
        return self._num_hashes

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.parts[block_hash[0]]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.parts)

    def add_all(self, hashes: Iterable[bytes]) -> None:
        """Add each; those already there change nothing."""
        parts, num_new = self.parts, 0
        for block_hash in hashes:
            part = parts[block_hash[0]]
            num_new -= len(part)
            part.add(block_hash)
            num_new += len(part)
        self._num_hashes += num_new

    def discard_all(self, hashes: Iterable[bytes]) -> None:
        """Remove each; those not there change nothing."""
        parts, num_gone = self.parts, 0
        for block_hash in hashes:
            part = parts[block_hash[0]]
            num_gone += len(part)
            part.discard(block_hash)
            num_gone -= len(part)
        self._num_hashes -= num_gone

    def drop(self) -> int:
        """Forget one part's hashes, the last not empty; return how many those were (0: none are left)."""
        while self.parts:
            if part := self.parts.pop():
                self._num_hashes -= len(part)
                return len(part)
        return 0
