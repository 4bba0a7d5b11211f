"""The blocks of each request: found by content, extended, registered, given back when no step needs them.

A block that a launched step may touch stays held until that step has completed; only then may it be handed
out anew. What does not fit on the device may live on in the host tier. Ids only, no tensors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from workers.engine.block_pool import BlockPool
from workers.engine.cache_log import CacheLog
from workers.engine.config import EngineConfig
from workers.engine.errors import OutOfBlocks
from workers.engine.host_tier import HostTier
from workers.engine.outputs import CacheEvents, CacheSnapshot
from workers.engine.plan import TailCopy
from workers.engine.request_state import RequestState, Swapped


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the KV of a request's leading tokens is."""

    device: list[int]
    host: list[int]
    """Host blocks of what follows."""
    num_tokens: int
    """In all of them; the last may be full in part."""


@dataclass(frozen=True, slots=True)
class SwapOut:
    """What it takes to move a request's blocks to the host."""

    hashes: list[bytes | None]
    """Of each block; None where it cannot be shared."""
    found: list[int | None]
    """The host block that has the same content already."""

    @property
    def num_copies(self) -> int:
        """Blocks to copy out; all of them are to be copied back."""
        return self.found.count(None)


class KVCache:
    """Block tables over one pool, and the prefix cache between them."""

    def __init__(self, config: EngineConfig) -> None:
        self._log = CacheLog()
        self._pool = BlockPool(config.num_blocks, self._log)
        self.host = HostTier(config, self._pool, self._log)
        self._block_size = config.block_size
        self._root = config.hash_root
        self._caches_prefixes = config.enable_prefix_caching
        self._replays_outputs = config.replays_outputs
        self._num_reserved = 0
        """Free blocks that are promised to requests which must not run dry."""
        self._last_completed_id = -1
        self._retired: deque[tuple[int, list[int]]] = deque()
        """Given back, but in use until the step: (step id, blocks), oldest step first."""
        self._tail_copies: list[TailCopy] = []
        """For the plan in the making; each holds its source."""
        self.num_forked_blocks = self.num_tail_copies = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a holder."""
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        """All device blocks."""
        return self._pool.num_blocks

    @property
    def num_unpromised_blocks(self) -> int:
        """Free blocks that are not reserved."""
        return self._pool.num_free - self._num_reserved

    @property
    def is_retiring(self) -> bool:
        """True if blocks come back as soon as launched steps and copies complete."""
        return bool(self._retired) or self.host.is_freeing

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self._block_size)

    # Finding and taking

    def find_prefix(self, request: RequestState) -> Prefix:
        """Where the request's leading tokens are; changes nothing.

        At least the last token known is left out: computing it gives the logits to sample from.
        """
        size, pool, root = self._block_size, self._pool, self._root
        # A mean is over the hidden states of all tokens, which a cached block does not give.
        is_reusable = self._caches_prefixes and not _needs_all_tokens(request)
        limit = (len(request.token_ids) - 1) // size if is_reusable else 0
        device: list[int] = []
        if limit > 0:
            request.hash_at(limit - 1, size, root)  # fills ``block_hashes`` up to there
        hashes = request.block_hashes
        for block_hash in islice(hashes, limit):
            block_id = pool.find(block_hash)
            if block_id is None:
                break
            device.append(block_id)
        num_found = len(device)
        swapped = request.swapped
        if swapped is not None and swapped.num_tokens > num_found * size:
            return Prefix(device, swapped.host_blocks[num_found:], swapped.num_tokens)
        host: list[int] = []
        if self.host.num_blocks:
            for block_hash in islice(hashes, num_found, limit):
                block_id = self.host.find(block_hash)
                if block_id is None:
                    break
                host.append(block_id)
        return Prefix(device, host, (num_found + len(host)) * size)

    def uncached_hashes(self, request: RequestState, num_cached: int) -> list[bytes]:
        """The contents of the full blocks that follow the ``num_cached`` tokens found, the last token left out."""
        if _needs_all_tokens(request):
            return []
        size = self._block_size
        blocks = range(num_cached // size, (len(request.token_ids) - 1) // size)
        return [request.hash_at(index, size, self._root) for index in blocks]

    def can_adopt(self, prefix: Prefix, num_blocks: int, num_spare_blocks: int) -> bool:
        """True if ``num_blocks`` blocks, the first of them in ``prefix``, fit and leave ``num_spare_blocks`` free."""
        num_missing = num_blocks - len(prefix.device)
        num_taken_from_free = sum(map(self._pool.is_free, prefix.device))
        return self.num_unpromised_blocks - num_taken_from_free - num_missing >= num_spare_blocks

    def adopt(self, request: RequestState, prefix: Prefix, step_id: int) -> None:
        """Start the request's block table with what ``find_prefix`` found.

        What is on the host is copied by the plan of ``step_id``: the request may compute once ``is_loaded``.
        """
        assert not request.block_ids, f"request {request.request_id} adopts a prefix but holds blocks"
        self._pool.hold(prefix.device)
        request.block_ids.extend(prefix.device)
        request.load_step_id = self.host.loading_step(prefix.device)
        if prefix.host:
            targets = self._pool.take(len(prefix.host))
            self.host.swap_in(prefix.host, targets, step_id)
            request.block_ids.extend(targets)
            request.load_step_id = step_id
        request.num_slots = len(request.block_ids) * self._block_size
        request.num_computed = prefix.num_tokens
        request.num_registered = len(prefix.device)
        # Blocks on their way can be found: who finds them waits for the same copies.
        self.register(request)

    def is_loaded(self, request: RequestState) -> bool:
        """True once the copies that the request's blocks wait for are done."""
        return request.load_step_id <= self.host.copied

    def reserve(self, request: RequestState, num_blocks: int) -> None:
        """Promise the request the blocks that it lacks of ``num_blocks``; they must be free."""
        request.is_promised = True
        self._promise(request, num_blocks - len(request.block_ids))

    def extend(self, request: RequestState, num_tokens: int) -> list[int]:
        """Grow the block table until it holds ``num_tokens`` and return what the rank has to append.

        A tail that is shared becomes the request's own first: a copy, or itself if nobody else is left.

        Raises:
            OutOfBlocks: too few blocks are free; nothing has changed.
        """
        block_ids = request.block_ids
        shares_tail = request.num_slots < len(block_ids) * self._block_size
        owns_tail = shares_tail and self._pool.is_writable(block_ids[-1])
        # One that waited for copies from the host has all its blocks already.
        num_new = max(0, self.blocks_for(num_tokens) - len(block_ids)) + (shares_tail and not owns_tail)
        payer = request.payer
        num_from_reserve = min(num_new, payer.num_reserved)
        if num_new - num_from_reserve > self.num_unpromised_blocks:
            raise OutOfBlocks(f"asked for {num_new} blocks, {self.num_unpromised_blocks} free")
        new_block_ids = self._pool.take(num_new)
        if num_from_reserve > 0:
            payer.num_reserved -= num_from_reserve
            self._num_reserved -= num_from_reserve
        if owns_tail:
            new_block_ids.insert(0, block_ids.pop())
        elif shares_tail:
            self._tail_copies.append(TailCopy(block_ids.pop(), new_block_ids[0]))
        block_ids.extend(new_block_ids)
        request.num_slots = len(block_ids) * self._block_size
        return new_block_ids

    def register(self, request: RequestState) -> None:
        """Let every block that is full of known tokens be found, even while a planned step computes it."""
        if not self._caches_prefixes:
            return
        for index in range(request.num_registered, self._num_shareable(request)):
            block_hash = request.hash_at(index, self._block_size, self._root)
            self._pool.register(request.block_ids[index], block_hash)
            request.num_registered = index + 1

    # Sharing

    def fork(self, source: RequestState, request: RequestState) -> list[int]:
        """Let the request, which has no blocks, share all that ``source`` has; return the full ones.

        The source goes on writing to its last block: before the request does, it gets a copy.
        """
        assert not request.block_ids, f"request {request.request_id} forks but holds blocks"
        self._pool.hold(source.block_ids)
        self.num_forked_blocks += len(source.block_ids)
        num_full = source.num_computed // self._block_size
        request.block_ids = source.block_ids.copy()
        request.num_slots = request.num_computed = source.num_computed
        request.num_registered = min(source.num_registered, num_full)
        return request.block_ids[:num_full]

    def share(self, source: RequestState, request: RequestState, num_tokens: int) -> None:
        """Let the request, which has no blocks, share the full ones of ``source``'s first ``num_tokens`` tokens."""
        assert not request.block_ids, f"request {request.request_id} shares but holds blocks"
        request.block_ids = source.block_ids[: num_tokens // self._block_size]
        self._pool.hold(request.block_ids)
        self.num_forked_blocks += len(request.block_ids)
        request.num_slots = request.num_computed = len(request.block_ids) * self._block_size
        request.num_registered = min(source.num_registered, len(request.block_ids))

    def rearrange(
        self, before: Sequence[RequestState], after: Sequence[RequestState], sources: Sequence[RequestState]
    ) -> list[int]:
        """Give each request of ``after`` the blocks of its source, one of ``before``, and those no others.

        Of requests with one source the first goes on writing to its last block, the others write to copies. No step
        in flight may touch any of them.

        Returns:
            Of each request, how many of its source's leading blocks are its own to write to or full.
        """
        assert all(one.last_step_id <= self._last_completed_id for one in before), "a step is in flight"
        had = {id(one): (one.block_ids, one.num_computed, one.num_registered) for one in before}
        num_free = self._pool.num_free
        for source in sources:
            self._pool.hold(source.block_ids)
        for one in before:
            self._pool.release(one.block_ids)
            one.block_ids, one.num_slots, one.num_computed, one.num_registered = [], 0, 0, 0
        owned: set[int] = set()
        num_told: list[int] = []
        for request, source in zip(after, sources, strict=True):
            block_ids, request.num_computed, request.num_registered = had[id(source)]
            request.block_ids = block_ids.copy()
            num_full = request.num_computed // self._block_size
            if id(source) in owned:
                self.num_forked_blocks += len(block_ids)
                request.num_slots = request.num_computed
                request.num_registered = min(request.num_registered, num_full)
                num_told.append(num_full)
            else:
                owned.add(id(source))
                request.num_slots = len(block_ids) * self._block_size
                num_told.append(len(block_ids))
        payer = after[0].payer
        if payer.is_promised:
            self._promise(payer, self._pool.num_free - num_free)
        return num_told

    def take_tail_copies(self, step_id: int) -> list[TailCopy]:
        """The copies that the plan of ``step_id`` has to carry; their sources are held until it completes."""
        copies, self._tail_copies = self._tail_copies, []
        self.num_tail_copies += len(copies)
        for copy in copies:
            self._retire([copy.source], step_id)
        return copies

    # Giving back

    def plan_swap_out(self, request: RequestState) -> SwapOut | None:
        """What it takes to keep the request's computed tokens on the host; None if there is no room."""
        num_tokens = request.num_computed
        if not num_tokens or not self.host.num_blocks or _needs_all_tokens(request):
            return None
        num_full = self._num_shareable(request) if self._caches_prefixes else 0
        hashes: list[bytes | None] = [
            request.hash_at(index, self._block_size, self._root) if index < num_full else None
            for index in range(self.blocks_for(num_tokens))
        ]
        found = [None if block_hash is None else self.host.find(block_hash) for block_hash in hashes]
        return SwapOut(hashes, found) if self.host.can_swap_out(found) else None

    def swap_out(self, request: RequestState, swap: SwapOut, step_id: int) -> None:
        """Keep the request's computed tokens on the host, by copies in the plan of ``step_id``; then ``retire`` it."""
        assert request.swapped is None, f"request {request.request_id} is swapped out twice"
        device_blocks = request.block_ids[: len(swap.found)]
        host_blocks = self.host.swap_out(device_blocks, swap.hashes, swap.found, step_id)
        # What the host had already is complete: no copy is to be waited for.
        copied_at = step_id if swap.num_copies else -1
        request.swapped = Swapped(host_blocks, request.num_computed, copied_at)

    def can_swap_in(self, request: RequestState) -> bool:
        """True if nothing of the request is still on its way to the host."""
        return request.swapped is None or request.swapped.step_id <= self.host.copied

    def drop_swapped(self, request: RequestState) -> None:
        """Let go of what the request has on the host, if anything."""
        if request.swapped is not None:
            self.host.drop(request.swapped.host_blocks)
            request.swapped = None

    def retire(self, request: RequestState) -> None:
        """Take the request's blocks away; they are free once the last step that touches them completes."""
        block_ids = request.block_ids
        request.block_ids = []
        request.num_slots = request.num_computed = request.num_registered = 0
        request.load_step_id = -1
        self._num_reserved -= request.num_reserved
        request.num_reserved = 0
        request.is_promised = False
        if block_ids:
            self._retire(block_ids, request.last_step_id)

    def complete(self, step_id: int) -> None:
        """Free what was retired and has waited for ``step_id`` or an earlier step."""
        self._last_completed_id = step_id
        while self._retired and self._retired[0][0] <= step_id:
            self._pool.release(self._retired.popleft()[1])

    # For listeners

    def drain_events(self) -> CacheEvents | None:
        """Changes of the prefix cache since the last call; None if there are none."""
        return self._log.drain()

    def snapshot(self) -> CacheSnapshot:
        """All hashes as of the last ``drain_events``."""
        return self._log.snapshot()

    def check(self, requests: Iterable[RequestState]) -> None:
        """Raise ``AssertionError`` unless ``requests``, retired blocks and copies are all that is held."""
        holders: Counter[int] = Counter()
        swapped: list[int] = []
        num_reserved = 0
        for request in requests:
            holders.update(request.block_ids)
            num_slots = len(request.block_ids) * self._block_size
            shares_tail = request.num_slots == request.num_computed > num_slots - self._block_size
            assert request.num_slots == num_slots or shares_tail, (
                f"request {request.request_id} miscounts its slots"
            )
            assert request.num_computed <= num_slots, f"request {request.request_id} computed past its blocks"
            num_reserved += request.num_reserved
            if request.swapped is not None:
                swapped += request.swapped.host_blocks
        for _, block_ids in self._retired:
            holders.update(block_ids)
        holders.update(copy.source for copy in self._tail_copies)
        holders.update(self.host.check(swapped))
        self._pool.check(holders)
        assert num_reserved == self._num_reserved, "reserved blocks are miscounted"
        assert self.num_unpromised_blocks >= 0, "blocks are promised that are not free"

    def _num_shareable(self, request: RequestState) -> int:
        """Leading blocks, full of known tokens, that others may find."""
        num_tokens = min(request.num_computed, len(request.token_ids))
        if self._replays_outputs:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        return num_tokens // self._block_size

    def _promise(self, request: RequestState, num_blocks: int) -> None:
        request.num_reserved += num_blocks
        self._num_reserved += num_blocks
        assert self.num_unpromised_blocks >= 0, "blocks are promised that are not free"

    def _retire(self, block_ids: list[int], step_id: int) -> None:
        if step_id <= self._last_completed_id:
            self._pool.release(block_ids)
            return
        index = len(self._retired)
        while index and self._retired[index - 1][0] > step_id:
            index -= 1
        self._retired.insert(index, (step_id, block_ids))


def can_fork(request: RequestState) -> bool:
    """True if the request may begin with what another has computed of the same tokens."""
    is_single = request.group is None and not request.num_preemptions
    return is_single and not _needs_all_tokens(request) and request.request.params.pooling is None


def _needs_all_tokens(request: RequestState) -> bool:
    params = request.request.params
    return params.pooling == "mean" or params.num_prompt_logprobs is not None
