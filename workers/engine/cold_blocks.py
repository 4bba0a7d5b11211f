"""Which cached blocks go to the host before they are handed out anew: the coldest, as many as prompts of late take.

Time is counted in device blocks handed out. Knows nothing of copies under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig

_MOST_LOOKED_AT = 4096
"""Blocks at the front of the free list, a step: walking past them takes a core 0.6 ms."""
_MOST_HIDDEN = 5
"""Where steps hand out more blocks than their hidden copies, copies may take so many times as long: half of a step."""


class ColdBlocks:
    """Chooses what to copy out, and says how much of it the steps hide."""

    def __init__(self, config: EngineConfig, device: BlockPool, host: BlockPool) -> None:
        self._device = device
        self._host = host
        # What four of the largest steps can hand out is kept copied, since copies are known to be done two or three
        # steps later, and looked at again after a quarter of it.
        step_blocks = config.max_num_batched_tokens // config.block_size + 1
        # What is here and on the device as well takes room from what is here alone.
        most = min(config.num_blocks * 3 // 4, config.num_host_blocks // 2)
        self._least_wanted = min(4 * step_blocks, most)
        self._most_wanted = min(most, max(_MOST_LOOKED_AT, self._least_wanted))
        self.longest = 1
        """Blocks of the longest request of late."""
        self._forget_at = 0
        """When the longest request no longer counts."""
        self._look_at = 0
        """When to look for blocks without a copy again."""
        self._now = 0
        """When the last step was planned."""
        self._num_allowed = 0.0
        """Blocks that the steps since the last choice hide the copies of."""

    def note_request(self, num_blocks: int) -> None:
        """A request of so many blocks waits. The longest counts until the device was filled twice without it."""
        now = self._device.num_taken
        if num_blocks >= self.longest or now >= self._forget_at:
            self.longest = num_blocks
            self._forget_at = now + 2 * self._device.num_blocks

    def note_step(self, num_hidden: float, num_loaded: int) -> None:
        """Allow for the copies that a step hides.

        As many as it hands out blocks, if half of its time is enough: with fewer each prompt would lose some of its
        blocks, and nothing can be found behind a lost one. And one out for each copied in.

        Args:
            num_hidden: copies that take a tenth of the step's time.
            num_loaded: blocks handed out since the last step that copies in fill.
        """
        now = self._device.num_taken
        num_computed = now - self._now - num_loaded
        self._now = now
        self._num_allowed += max(num_hidden, min(num_computed, _MOST_HIDDEN * num_hidden)) + num_loaded

    def choose(self) -> list[int]:
        """The coldest blocks that have no copy, the coldest first: as many as the steps since the last choice hide.

        Steps that had nothing to hide leave nothing to later ones, which would not hide it.
        """
        num_allowed = int(self._num_allowed)
        self._num_allowed -= num_allowed
        if self._device.num_taken < self._look_at:
            return []
        num_wanted, most = self._num_wanted, min(num_allowed, self._host.num_free)
        chosen = list(islice(self._without_copy(num_wanted), most))
        if len(chosen) < most:
            self._look_at = self._device.num_taken + num_wanted // 4 + 1
        return chosen

    @property
    def _num_wanted(self) -> int:
        """Of the coldest blocks, how many are kept copied.

        A prompt that comes again takes all its blocks at once, before any step: twice as many as the longest has are
        what it overwrites, and what the next one does.
        """
        return min(max(2 * self.longest, self._least_wanted), self._most_wanted)

    def _without_copy(self, num_looked_at: int) -> Iterator[int]:
        for block_id in islice(self._device.coldest(), num_looked_at):
            block_hash = self._device.hash_of(block_id)
            if block_hash is not None and self._host.find(block_hash) is None:
                yield block_id
