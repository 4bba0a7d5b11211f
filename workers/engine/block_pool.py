"""The blocks of one tier: which are free, how often each is held, and which content each still has.

Ids and hashes only, no tensors, no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from workers.engine.cache_log import DEVICE, CacheLog
from workers.engine.errors import OutOfBlocks
from workers.engine.free_list import FreeList


class BlockPool:
    """Blocks and how many holders each has.

    A block is free (count 0, in ``_free``) or held. A free block may keep its hash: it can still be found,
    until it is handed out anew. The front of the free list is handed out first: blocks without a hash, then
    the least recently released.
    """

    def __init__(self, num_blocks: int, log: CacheLog | None = None, tier: int = DEVICE) -> None:
        """Start with all blocks free and empty.

        Args:
            num_blocks: of this tier.
            log: learns which contents can be found here, and which no longer.
            tier: the name of this tier in ``log``.
        """
        self._free = FreeList(num_blocks)
        self._num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._generations = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._log = log or CacheLog()
        self._tier = tier
        self.num_taken = 0
        """Blocks handed out since start."""

    @property
    def num_blocks(self) -> int:
        """All blocks, free or held."""
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can hand out, those with a hash included."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Hand out ``num_blocks`` ids, each held once, or raise ``OutOfBlocks`` and change nothing.

        The content of what is handed out can no longer be found.
        """
        assert num_blocks >= 0, f"asked for {num_blocks} blocks"
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"asked for {num_blocks} blocks, {len(self._free)} free")
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self.num_taken += num_blocks
        for block_id in block_ids:
            self._num_holders[block_id] = 1
            self._generations[block_id] += 1
            self._forget(block_id)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Count one holder more for each block; a free one leaves the free list and keeps its content."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                self._free.remove(block_id)
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one holder less for each block of a chain.

        The tail is freed first, so that of one chain the head, which more requests may share, lives longest.
        """
        for block_id in reversed(block_ids):
            num_holders = self._num_holders[block_id] - 1
            assert num_holders >= 0, f"block {block_id} is released more often than it was held"
            self._num_holders[block_id] = num_holders
            if num_holders == 0:
                if self._hashes[block_id] is None:
                    self._free.push(block_id)
                else:
                    self._free.append(block_id)

    def release_to_front(self, block_id: int) -> None:
        """Count one holder less; a block without any is handed out next."""
        num_holders = self._num_holders[block_id] - 1
        assert num_holders >= 0, f"block {block_id} is released more often than it was held"
        self._num_holders[block_id] = num_holders
        if num_holders == 0:
            self._free.push(block_id)

    def is_free(self, block_id: int) -> bool:
        """True if nobody holds the block."""
        return self._num_holders[block_id] == 0

    def is_writable(self, block_id: int) -> bool:
        """True if the block has one holder and no content under which others could find it."""
        return self._num_holders[block_id] == 1 and self._hashes[block_id] is None

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, free or held; None if there is none."""
        return self._block_of.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Let a held block be found by its content; a no-op where another block has the same."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is registered but free"
        if block_hash in self._block_of:
            return
        assert self._hashes[block_id] is None, f"block {block_id} is registered with two contents"
        self._hashes[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._log.stored(block_hash, self._tier)

    def hash_of(self, block_id: int) -> bytes | None:
        """The content under which the block can be found; None if it cannot."""
        return self._hashes[block_id]

    def generation_of(self, block_id: int) -> int:
        """How often the block has been handed out: with another number it may contain something else."""
        return self._generations[block_id]

    def coldest(self) -> Iterator[int]:
        """Free blocks in the order in which they will be handed out; nothing may change meanwhile."""
        return iter(self._free)

    def disown(self, block_id: int) -> None:
        """Let a block no longer be found: its content is not what its hash says."""
        self._forget(block_id)
        if self._num_holders[block_id] == 0:
            self._free.remove(block_id)
            self._free.push(block_id)

    def check(self, holders: Counter[int] | None = None) -> None:
        """Raise ``AssertionError`` if a block is lost, counted twice or found under a wrong hash.

        Args:
            holders: how often each block is held, by the caller's books; None to leave that out.
        """
        self._free.check()
        num_held = sum(count > 0 for count in self._num_holders)
        assert num_held + len(self._free) == self.num_blocks, "a block is lost"
        for block_id, count in enumerate(self._num_holders):
            assert count >= 0, f"block {block_id} has a negative count"
            assert (count == 0) == (block_id in self._free), (
                f"block {block_id} is both free and held, or neither"
            )
            assert holders is None or count == holders[block_id], (
                f"block {block_id} has a holder unaccounted for"
            )
        for block_hash, block_id in self._block_of.items():
            assert self._hashes[block_id] == block_hash, f"block {block_id} is found under a hash not its own"
        num_hashed = sum(block_hash is not None for block_hash in self._hashes)
        assert num_hashed == len(self._block_of), "a block has a hash under which it is not found"

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            self._hashes[block_id] = None
            del self._block_of[block_hash]
            self._log.evicted(block_hash, self._tier)
