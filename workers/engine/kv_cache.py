"""The blocks of each request: found by content, extended, registered, given back when no step needs them.

A block that a launched step may touch stays held until that step has completed; only then may it be handed
out anew. Ids only, no tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.outputs import CacheEvents, CacheSnapshot
from workers.engine.request_state import RequestState


class KVCache:
    """Block tables over one pool, and the prefix cache between them."""

    def __init__(self, config: EngineConfig) -> None:
        self._pool = BlockPool(config.num_blocks)
        self._block_size = config.block_size
        self._root = config.hash_root
        self._caches_prefixes = config.enable_prefix_caching
        self._last_completed_id = -1
        self._retired: deque[tuple[int, list[int]]] = deque()
        """Given back, but in use until the step: (step id, blocks), oldest step first."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken at once."""
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def is_retiring(self) -> bool:
        """True if blocks come back as soon as launched steps complete."""
        return bool(self._retired)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self._block_size)

    def find_prefix(self, request: RequestState) -> list[int]:
        """Blocks that hold the request's leading tokens; changes nothing.

        At least the last token known is left out: computing it gives the logits to sample from.
        """
        block_ids: list[int] = []
        # A mean is over the hidden states of all tokens, which a cached block does not give.
        if self._caches_prefixes and request.request.params.pooling != "mean":
            for index in range((len(request.token_ids) - 1) // self._block_size):
                block_id = self._pool.find(request.hash_at(index, self._block_size, self._root))
                if block_id is None:
                    break
                block_ids.append(block_id)
        return block_ids

    def can_adopt(self, prefix: list[int], num_tokens: int, num_spare_blocks: int) -> bool:
        """True if ``num_tokens``, the first in ``prefix``, fit and leave ``num_spare_blocks`` free."""
        num_missing = self.blocks_for(num_tokens) - len(prefix)
        num_taken_from_free = sum(map(self._pool.is_free, prefix))
        return self._pool.num_free - num_taken_from_free - num_missing >= num_spare_blocks

    def adopt(self, request: RequestState, prefix: list[int]) -> None:
        """Start the request's block table with the blocks of ``find_prefix``."""
        assert not request.block_ids, f"request {request.request_id} adopts a prefix but holds blocks"
        self._pool.hold(prefix)
        request.block_ids.extend(prefix)
        request.num_slots = request.num_computed = len(prefix) * self._block_size
        request.num_registered = len(prefix)

    def extend(self, request: RequestState, num_tokens: int) -> list[int]:
        """Grow the block table until it holds ``num_tokens`` and return what was appended.

        Raises:
            OutOfBlocks: too few blocks are free; nothing has changed.
        """
        new_block_ids = self._pool.take(self.blocks_for(num_tokens) - len(request.block_ids))
        request.block_ids.extend(new_block_ids)
        request.num_slots += len(new_block_ids) * self._block_size
        return new_block_ids

    def register(self, request: RequestState) -> None:
        """Let every block that is full of known tokens be found, even while a planned step computes it."""
        if not self._caches_prefixes:
            return
        num_full = min(request.num_computed, len(request.token_ids)) // self._block_size
        for index in range(request.num_registered, num_full):
            block_hash = request.hash_at(index, self._block_size, self._root)
            self._pool.register(request.block_ids[index], block_hash)
            request.num_registered = index + 1

    def retire(self, request: RequestState) -> None:
        """Take the request's blocks away; they are free once the last step that touches them completes."""
        block_ids = request.block_ids
        request.block_ids = []
        request.num_slots = request.num_computed = request.num_registered = 0
        if not block_ids:
            return
        if request.last_step_id <= self._last_completed_id:
            self._pool.release(block_ids)
            return
        index = len(self._retired)
        while index and self._retired[index - 1][0] > request.last_step_id:
            index -= 1
        self._retired.insert(index, (request.last_step_id, block_ids))

    def complete(self, step_id: int) -> None:
        """Free what was retired and has waited for ``step_id`` or an earlier step."""
        self._last_completed_id = step_id
        while self._retired and self._retired[0][0] <= step_id:
            self._pool.release(self._retired.popleft()[1])

    def drain_events(self) -> CacheEvents | None:
        """Changes of the prefix cache since the last call; None if there are none."""
        return self._pool.drain_events()

    def snapshot(self) -> CacheSnapshot:
        """All hashes as of the last ``drain_events``."""
        return self._pool.snapshot()

    def check(self, requests: Iterable[RequestState]) -> None:
        """Raise ``AssertionError`` unless ``requests`` and retired blocks are all that is held."""
        holders: Counter[int] = Counter()
        for request in requests:
            holders.update(request.block_ids)
            num_slots = len(request.block_ids) * self._block_size
            assert request.num_slots == num_slots, f"request {request.request_id} miscounts its slots"
            assert request.num_computed <= num_slots, f"request {request.request_id} computed past its blocks"
        for _, block_ids in self._retired:
            holders.update(block_ids)
        self._pool.check(holders)
