"""The host tier: blocks in host memory, and the copies between them and device blocks.

A copy holds both its ends until a result says that it is done, so neither is handed out while it runs. A host block
can be found by its content once the copy that fills it is done. Ids only: the ranks move the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from workers.engine.block_pool import BlockPool
from workers.engine.cache_log import HOST, CacheLog
from workers.engine.config import EngineConfig
from workers.engine.plan import BlockCopy

_MOST_LOOKED_AT = 4096
"""Blocks at the front of the free list, a step: walking past them takes a core 0.6 ms."""
_MOST_HIDDEN = 5
"""Where steps hand out more blocks than their hidden copies, copies may take so many times as long: half of a step."""


@dataclass(slots=True)
class _Batch:
    """The copies of one plan."""

    step_id: int
    swap_out: list[BlockCopy] = field(default_factory=list)
    out_hashes: list[bytes | None] = field(default_factory=list)
    """What each block copied out contains; None where it cannot be shared."""
    swap_in: list[BlockCopy] = field(default_factory=list)
    behind: dict[int, tuple[int | None, bytes | None]] = field(default_factory=dict)
    """Of each cold block: the one that would have been handed out right before it, and what that held."""


class HostTier:
    """Host blocks by content and by holder, and the copies under way."""

    def __init__(self, config: EngineConfig, device: BlockPool, log: CacheLog) -> None:
        self._pool = BlockPool(config.num_host_blocks, log, HOST)
        self._device = device
        self._generations = [0] * config.num_host_blocks
        self._batches: deque[_Batch] = deque()
        """Copies not known to be done, oldest first; the last may be in the making."""
        self._loading: dict[int, int] = {}
        """Device blocks that copies in will fill: the step whose plan has the copy."""
        # What four of the largest steps can hand out is kept copied, since copies are known to be done two or three
        # steps later, and looked at again after a quarter of it.
        step_blocks = config.max_num_batched_tokens // config.block_size + 1
        # What is here and on the device as well takes room from what is here alone.
        most = min(config.num_blocks * 3 // 4, config.num_host_blocks // 2)
        self._least_cold_wanted = min(4 * step_blocks, most)
        self._most_cold_wanted = min(most, max(_MOST_LOOKED_AT, self._least_cold_wanted))
        self.longest = 1
        """Blocks of the longest request of late."""
        self._forget_at = 0
        """Device blocks handed out since start at which the longest prompt no longer counts."""
        self._next_look = 0
        """Device blocks handed out since start at which to look for cold ones again."""
        self._num_handed_out = 0
        """Device blocks handed out before the last step."""
        self._num_loaded = 0
        """Of those handed out since, the ones that copies in fill."""
        self._num_due = 0.0
        """Cold blocks that could have been copied since the last batch of them, or a part of one."""
        self._max_swapped = config.num_host_blocks - int(config.kv_host_fraction * config.num_host_blocks)
        self._num_swapped = 0
        self.copied = -1
        """All copies of plans up to this one are done."""
        self.num_blocks_out = self.num_blocks_in = self.num_corrupt = 0

    @property
    def num_blocks(self) -> int:
        """All host blocks."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Host blocks without a holder, those with content included."""
        return self._pool.num_free

    @property
    def has_copies(self) -> bool:
        """True while a copy is not known to be done."""
        return bool(self._batches)

    @property
    def num_copies(self) -> int:
        """Blocks whose copy is not known to be done."""
        return sum(len(batch.swap_out) + len(batch.swap_in) for batch in self._batches)

    @property
    def is_freeing(self) -> bool:
        """True if device blocks come back as copies out are done."""
        return any(batch.swap_out for batch in self._batches)

    def find(self, block_hash: bytes) -> int | None:
        """The host block with this content; None if there is none."""
        return self._pool.find(block_hash)

    def loading_step(self, device_blocks: Iterable[int]) -> int:
        """The last step whose plan copies into one of ``device_blocks``; -1 if all have their contents."""
        loading = self._loading
        return max((loading.get(block_id, -1) for block_id in device_blocks), default=-1) if loading else -1

    # What a preempted request leaves here

    def can_swap_out(self, found: Sequence[int | None]) -> bool:
        """True if a request's blocks find room; ``found`` has the host block of each that is here already."""
        num_new = found.count(None)
        num_taken = sum(block is not None and self._pool.is_free(block) for block in found)
        return (
            num_new + num_taken <= self._pool.num_free and self._num_swapped + len(found) <= self._max_swapped
        )

    def swap_out(
        self,
        device_blocks: Sequence[int],
        hashes: Sequence[bytes | None],
        found: Sequence[int | None],
        step_id: int,
    ) -> list[int]:
        """Copy out the blocks that are not ``found`` here and return the host blocks of all, now held."""
        self._pool.hold(block for block in found if block is not None)
        fresh = iter(self._pool.take(found.count(None)))
        self._num_swapped += len(found)
        held: list[int] = []
        for device_block, block_hash, host_block in zip(device_blocks, hashes, found, strict=True):
            if host_block is None:
                host_block = next(fresh)
                self._copy_out(device_block, host_block, block_hash, step_id)
            held.append(host_block)
        return held

    def drop(self, host_blocks: Sequence[int]) -> None:
        """Let go of a request's host blocks; what can be shared may still be found."""
        self._num_swapped -= len(host_blocks)
        self._pool.release(host_blocks)

    # Copies

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int], step_id: int) -> None:
        """Fill ``device_blocks`` from ``host_blocks``."""
        batch = self._batch(step_id)
        self._pool.hold(host_blocks)
        self._device.hold(device_blocks)
        for host_block, device_block in zip(host_blocks, device_blocks, strict=True):
            batch.swap_in.append(BlockCopy(device_block, host_block, self._generations[host_block]))
            self._loading[device_block] = step_id
        self.num_blocks_in += len(host_blocks)
        self._num_loaded += len(host_blocks)

    def expect(self, num_blocks: int) -> None:
        """A request of so many blocks has come. The longest counts until the device was filled twice without it."""
        if num_blocks >= self.longest or self._device.num_taken >= self._forget_at:
            self.longest = num_blocks
            self._forget_at = self._device.num_taken + 2 * self._device.num_blocks

    @property
    def _num_cold_wanted(self) -> int:
        """Of the coldest blocks, how many are kept copied.

        A prompt that comes again takes all its blocks at once, before any step: twice as many as the longest has are
        what it overwrites, and what the next one does.
        """
        return min(max(2 * self.longest, self._least_cold_wanted), self._most_cold_wanted)

    def drift(self, step_id: int, num_spare: int, num_hidden: float) -> None:
        """Copy out the coldest cached blocks before they are handed out anew.

        They are held meanwhile, so at most ``num_spare`` at a time. One batch of it at a time: for each step since the
        last one ``num_hidden``, or as many as the steps hand out, and one out for each that was copied in. Fewer, and
        each prompt would lose some blocks, behind which nothing can be found.
        """
        num_taken = self._device.num_taken - self._num_handed_out
        self._num_handed_out += num_taken
        num_computed = num_taken - self._num_loaded
        self._num_due += max(num_hidden, min(num_computed, _MOST_HIDDEN * num_hidden)) + self._num_loaded
        self._num_loaded = 0
        if self.is_freeing:
            return
        num_due = int(self._num_due)
        self._num_due -= num_due
        if self._device.num_taken < self._next_look:
            return
        num_wanted = self._num_cold_wanted
        # Copied ones come back to where they were, so that what is looked at next time are the same and as many behind
        # them as have been handed out since.
        candidates = (
            (block_id, block_hash)
            for block_id in islice(self._device.coldest(), num_wanted)
            if (block_hash := self._device.hash_of(block_id)) is not None
            and self._pool.find(block_hash) is None
        )
        most = min(num_spare, num_due, self._pool.num_free)
        cold = list(islice(candidates, most))
        if len(cold) < most:
            self._next_look = self._device.num_taken + num_wanted // 4 + 1
        if cold:
            batch = self._batch(step_id)
            for block_id, _ in cold:
                behind = self._device.colder_than(block_id)
                batch.behind[block_id] = (behind, None if behind is None else self._device.hash_of(behind))
        # The coldest last, as those of a preempted request: its tail.
        for (block_id, block_hash), host_block in zip(
            reversed(cold), self._pool.take(len(cold)), strict=True
        ):
            self._copy_out(block_id, host_block, block_hash, step_id)
            self._pool.release([host_block])  # the copy alone holds it

    def take_plan(self, step_id: int) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """The copies, out and in, that the plan of ``step_id`` has to carry."""
        if not self._batches or self._batches[-1].step_id != step_id:
            return [], []
        batch = self._batches[-1]
        return batch.swap_out, batch.swap_in

    def complete(self, copied: int, corrupt_blocks: Sequence[int]) -> None:
        """Let go of the ends of all copies of plans up to ``copied``.

        What went into ``corrupt_blocks`` can no longer be found, here or on the device.
        """
        self.copied = max(self.copied, copied)
        corrupt = set(corrupt_blocks)
        self.num_corrupt += len(corrupt)
        while self._batches and self._batches[0].step_id <= copied:
            batch = self._batches.popleft()
            for copy, block_hash in zip(batch.swap_out, batch.out_hashes, strict=True):
                if block_hash is not None and self._pool.hash_of(copy.host) is None:
                    self._pool.register(copy.host, block_hash)
            for copy in batch.swap_in:
                if copy.device in corrupt:
                    self._pool.disown(copy.host)
                    self._device.disown(copy.device)
                if self._loading[copy.device] == batch.step_id:
                    del self._loading[copy.device]
            self._release_copied(batch)
            self._pool.release([copy.host for copy in batch.swap_out])
            self._device.release([copy.device for copy in batch.swap_in])
            self._pool.release([copy.host for copy in batch.swap_in])

    def _release_copied(self, batch: _Batch) -> None:
        """Put cold blocks back where they were, unless what was colder is gone; others first, tails before heads."""
        device = self._device
        for copy in reversed(batch.swap_out):
            behind, behind_hash = batch.behind.get(copy.device, (None, None))
            if behind is not None and not (device.is_free(behind) and device.hash_of(behind) == behind_hash):
                behind = None
            device.release_to_front(copy.device, behind)

    def check(self, swapped: Iterable[int]) -> list[int]:
        """Raise ``AssertionError`` if host blocks do not agree with the books.

        Args:
            swapped: host blocks held by preempted requests, as often as they are held.

        Returns:
            Device blocks held by copies, as often as they are.
        """
        holders = Counter(swapped)
        assert holders.total() == self._num_swapped, "blocks of preempted requests are miscounted"
        device: list[int] = []
        for batch in self._batches:
            for copy in (*batch.swap_out, *batch.swap_in):
                holders[copy.host] += 1
                device.append(copy.device)
        self._pool.check(holders)
        return device

    def _copy_out(self, device_block: int, host_block: int, block_hash: bytes | None, step_id: int) -> None:
        batch = self._batch(step_id)
        self._generations[host_block] += 1
        self._device.hold([device_block])
        self._pool.hold([host_block])
        batch.swap_out.append(BlockCopy(device_block, host_block, self._generations[host_block]))
        batch.out_hashes.append(block_hash)
        self.num_blocks_out += 1

    def _batch(self, step_id: int) -> _Batch:
        if not self._batches or self._batches[-1].step_id != step_id:
            self._batches.append(_Batch(step_id))
        return self._batches[-1]
