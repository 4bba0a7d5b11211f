"""Blocks for requests that run, and rows for more important ones: taken from others, if it must be.

Who gives way, and whether its blocks are copied or computed again, ``preemption`` says.
"""

from __future__ import annotations

from itertools import takewhile

from workers.engine.config import EngineConfig
from workers.engine.draft import Draft
from workers.engine.errors import OutOfBlocks
from workers.engine.kv_cache import KVCache
from workers.engine.preemption import choose_victim, prefers_swap
from workers.engine.queues import Queues
from workers.engine.request_state import RequestState


class RoomMaker:
    """Lets requests grow, and preempts; counts how often."""

    def __init__(self, config: EngineConfig, cache: KVCache, queues: Queues) -> None:
        self._config = config
        self._cache = cache
        self._queues = queues
        self.num_preemptions = 0
        self.num_swap_preemptions = 0
        """Of ``num_preemptions``, by swapping out."""

    def grow(self, request: RequestState, num_tokens: int, draft: Draft) -> list[int] | None:
        """Make room for ``num_tokens``, by preemption if it must be; None if that has to wait for a step."""
        while True:
            try:
                return self._cache.extend(request, num_tokens)
            except OutOfBlocks:
                if self._cache.is_retiring or not self._preempt_for(request, draft):
                    draft.is_starved = True
                    return None

    def make_way(self, draft: Draft) -> None:
        """Preempt the last in turn for a more important request that waits for its row or blocks; one a step."""
        queues = self._queues
        if not queues.waiting or not queues.running or self._cache.is_retiring:
            return
        request = queues.waiting.first
        last = next(reversed(queues.running))
        if request.num_in_flight or last.turn[0] <= request.turn[0]:
            return
        prefix = self._cache.find_prefix(request)
        num_blocks = self._cache.blocks_for(len(request.token_ids))
        has_room = self._cache.can_adopt(prefix, num_blocks, self._config.num_watermark_blocks)
        if has_room and queues.num_free_rows >= request.num_rows:
            return
        victim = choose_victim(reversed(queues.running), request, draft.step_id, self._config)
        if victim is not None and victim.turn[0] > request.turn[0]:
            self._preempt(victim, draft)

    def _preempt_for(self, request: RequestState, draft: Draft) -> bool:
        """Send back to waiting the last in turn behind ``request`` that may be, those still loading first."""
        queues = self._queues
        behind = takewhile(lambda other: other.turn > request.turn, reversed(queues.loading))
        if (loading := next(behind, None)) is not None:
            queues.unload(loading)
            return True
        victim = choose_victim(reversed(queues.running), request, draft.step_id, self._config)
        if victim is None:
            return False
        self._preempt(victim, draft)
        return True

    def _preempt(self, request: RequestState, draft: Draft) -> None:
        """Take row and blocks; tokens stay, one in flight included. What is computed moves to the host or is lost.

        Of a search all beams go, and what they have not chosen from yet is computed again.
        """
        group = request.group
        if group is not None:
            request = group.leader
            for member in group.members[1:]:
                member.num_preemptions += 1
        host = self._cache.host
        if group is None and host.num_blocks and self._config.preemption_mode != "recompute":
            swap = self._cache.plan_swap_out(request)
            if swap is not None and prefers_swap(request, swap, host.num_copies, draft.cost, self._config):
                self._cache.swap_out(request, swap, draft.step_id)
                self.num_swap_preemptions += 1
        self._queues.rows.leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queues.enqueue(request)
