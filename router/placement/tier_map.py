"""Where each block of one replica is: hash -> tier, in a form that never stalls its owner.

Many small dicts, one by a hash's first byte: one dict of a million entries rehashes all of them in one call when it
grows (25 to 30 ms measured, longer than an ingress's event loop may pause). Hashes are uniform, so 256 parts grow at
different moments, 4,000 entries each at a million (0.1 ms).

Dicts, also where a set would do: CPython's collector visits every member of a set (45 ms at a million hashes, each
time), and passes over a dict whose keys and values are all ``bytes`` and numbers (up to 3.13; 0.03 ms).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_NUM_PARTS = 256


class TierMap:
    """Tiers of distinct non-empty ``bytes`` of uniform first byte."""

    __slots__ = ("_num_hashes", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[bytes, int]] = [{} for _ in range(_NUM_PARTS)]
        """By first byte. To be read by callers that cannot afford a method call; changed here alone."""
        self._num_hashes = 0

    def __len__(self) -> int:
        return self._num_hashes

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        for part in self.parts:
            yield from part.items()

    def put_all(self, hashes: Iterable[bytes], tier: int, most_new: int) -> int:
        """Note that the hashes are in ``tier`` now, but of those not here yet only the first ``most_new``.

        Returns:
            How many were left out.
        """
        parts, num_new, num_left_out = self.parts, 0, 0
        for block_hash in hashes:
            part = parts[block_hash[0]]
            if block_hash not in part:
                if num_new >= most_new:
                    num_left_out += 1
                    continue
                num_new += 1
            part[block_hash] = tier
        self._num_hashes += num_new
        return num_left_out

    def discard_all(self, hashes: Iterable[bytes]) -> None:
        """Remove each; those not there change nothing."""
        parts, num_gone = self.parts, 0
        for block_hash in hashes:
            if parts[block_hash[0]].pop(block_hash, 0):
                num_gone += 1
        self._num_hashes -= num_gone

    def drop(self) -> int:
        """Forget one part's hashes, the last not empty; return how many those were (0: none are left)."""
        while self.parts:
            if part := self.parts.pop():
                self._num_hashes -= len(part)
                return len(part)
        return 0
