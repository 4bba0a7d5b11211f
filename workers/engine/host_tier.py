"""The host tier: blocks in host memory, and the copies between them and device blocks.

A host block can be found by its content once the copy that fills it is done. Ids only: the ranks move the bytes.

A copy holds its ends until a result says that it is done, so that neither is handed out while it runs, but for cold
blocks, which nobody uses: those stay free while they are copied. One whose turn comes meanwhile is handed out, and its
copy given up: what that brings is never found. So the device hands out its blocks in the order in which it would
without a host tier, and what is found here comes on top of what would be found without.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workers.engine.block_pool import BlockPool
from workers.engine.cache_log import HOST, CacheLog
from workers.engine.cold_blocks import ColdBlocks
from workers.engine.config import EngineConfig
from workers.engine.plan import BlockCopy


@dataclass(frozen=True, slots=True)
class _CopyOut:
    """A copy to the host."""

    copy: BlockCopy
    block_hash: bytes | None
    """What the block contains; None where it cannot be shared."""
    device_generation: int | None
    """That of a cold block: with another one it has been handed out. None: the copy holds the device block."""


@dataclass(slots=True)
class _Batch:
    """The copies of one plan."""

    step_id: int
    swap_out: list[_CopyOut] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)


class HostTier:
    """Host blocks by content and by holder, and the copies under way."""

    def __init__(self, config: EngineConfig, device: BlockPool, log: CacheLog) -> None:
        self._pool = BlockPool(config.num_host_blocks, log, HOST)
        self._device = device
        self.cold = ColdBlocks(config, device, self._pool)
        self._batches: deque[_Batch] = deque()
        """Copies not known to be done, oldest first; the last may be in the making."""
        self._loading: dict[int, int] = {}
        """Device blocks that copies in will fill: the step whose plan has the copy."""
        self._num_loaded = 0
        """Device blocks that copies in fill, of the plan in the making."""
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
        return any(out.device_generation is None for batch in self._batches for out in batch.swap_out)

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
                self._device.hold([device_block])
                self._copy_out(device_block, host_block, block_hash, None, step_id)
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
            batch.swap_in.append(BlockCopy(device_block, host_block, self._pool.generation_of(host_block)))
            self._loading[device_block] = step_id
        self.num_blocks_in += len(host_blocks)
        self._num_loaded += len(host_blocks)

    def drift(self, step_id: int, num_hidden: float) -> None:
        """Copy out the coldest cached blocks before they are handed out anew, beside a step that hides ``num_hidden``.

        One batch at a time: while copies out are under way, what further steps hide adds up.
        """
        self.cold.note_step(num_hidden, self._num_loaded)
        self._num_loaded = 0
        if any(batch.swap_out for batch in self._batches):
            return
        device, pool = self._device, self._pool
        cold = self.cold.choose()
        # The coldest last, as those of a preempted request: its tail.
        for block_id, host_block in zip(reversed(cold), pool.take(len(cold)), strict=True):
            self._copy_out(
                block_id, host_block, device.hash_of(block_id), device.generation_of(block_id), step_id
            )
            pool.release([host_block])  # the copy alone holds it

    def take_plan(self, step_id: int) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """The copies, out and in, that the plan of ``step_id`` has to carry."""
        if not self._batches or self._batches[-1].step_id != step_id:
            return [], []
        batch = self._batches[-1]
        return [out.copy for out in batch.swap_out], batch.swap_in

    def complete(self, copied: int, corrupt_blocks: Sequence[int]) -> None:
        """Let go of the ends of all copies of plans up to ``copied``.

        What went into ``corrupt_blocks`` can no longer be found, here or on the device.
        """
        self.copied = max(self.copied, copied)
        corrupt = set(corrupt_blocks)
        self.num_corrupt += len(corrupt)
        while self._batches and self._batches[0].step_id <= copied:
            batch = self._batches.popleft()
            for out in batch.swap_out:
                if out.block_hash is not None and not self._is_given_up(out):
                    self._pool.register(out.copy.host, out.block_hash)
            for copy in batch.swap_in:
                if copy.device in corrupt:
                    self._pool.disown(copy.host)
                    self._device.disown(copy.device)
                if self._loading[copy.device] == batch.step_id:
                    del self._loading[copy.device]
            # What is on the host as well is the first to be handed out, tails before heads.
            for out in batch.swap_out:
                if out.device_generation is None:
                    self._device.release_to_front(out.copy.device)
            self._pool.release([out.copy.host for out in batch.swap_out])
            self._device.release([copy.device for copy in batch.swap_in])
            self._pool.release([copy.host for copy in batch.swap_in])

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
            for copy in (*(out.copy for out in batch.swap_out), *batch.swap_in):
                holders[copy.host] += 1
            device += (out.copy.device for out in batch.swap_out if out.device_generation is None)
            device += (copy.device for copy in batch.swap_in)
        self._pool.check(holders)
        return device

    def _copy_out(
        self,
        device_block: int,
        host_block: int,
        block_hash: bytes | None,
        device_generation: int | None,
        step_id: int,
    ) -> None:
        self._pool.hold([host_block])
        copy = BlockCopy(device_block, host_block, self._pool.generation_of(host_block))
        self._batch(step_id).swap_out.append(_CopyOut(copy, block_hash, device_generation))
        self.num_blocks_out += 1

    def _is_given_up(self, out: _CopyOut) -> bool:
        generation = out.device_generation
        return generation is not None and generation != self._device.generation_of(out.copy.device)

    def _batch(self, step_id: int) -> _Batch:
        if not self._batches or self._batches[-1].step_id != step_id:
            self._batches.append(_Batch(step_id))
        return self._batches[-1]
