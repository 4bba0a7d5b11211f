"""What waiting requests will have to compute, as far as can be told: blocks that several want count once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from workers.engine.cost_model import attended
from workers.engine.kv_cache import KVCache
from workers.engine.request_state import RequestState


class WaitingWork:
    """Tokens that waiting requests lack, and which of them is the first to compute which block."""

    def __init__(self, cache: KVCache, block_size: int, caches_prefixes: bool) -> None:
        self._cache = cache
        self._block_size = block_size
        self._caches_prefixes = caches_prefixes
        self._claimed: set[bytes] = set()
        """Blocks that waiting requests will compute: later ones with the same beginning will find them."""
        self.num_tokens = 0
        self.num_attended = 0
        """Pairs of these tokens and the KV tokens that they will read."""

    def add(self, request: RequestState) -> None:
        """Count a request that begins to wait."""
        num_known = len(request.token_ids) + request.num_in_flight
        num_cached = self._cache.find_prefix(request).num_tokens
        num_uncached = num_known - num_cached - self._claim(request, num_cached)
        request.num_uncached_estimate = num_uncached
        request.num_attended_estimate = attended(num_uncached, num_known - num_uncached)
        self.num_tokens += num_uncached
        self.num_attended += request.num_attended_estimate

    def remove(self, request: RequestState) -> None:
        """Count a request no longer."""
        self.num_tokens -= request.num_uncached_estimate
        self.num_attended -= request.num_attended_estimate
        self._claimed.difference_update(request.claims)
        request.claims = []

    def reclaim(self, block_hash: bytes, index: int, waiting: Iterable[RequestState]) -> None:
        """Count those anew that relied on a request, now gone, to compute their block ``index`` of this hash."""
        for request in waiting:
            if len(request.block_hashes) > index and request.block_hashes[index] == block_hash:
                self.remove(request)
                self.add(request)

    def check(self, waiting: Iterable[RequestState]) -> None:
        """Raise ``AssertionError`` if the counts are not those of ``waiting``."""
        requests = list(waiting)
        assert sum(request.num_uncached_estimate for request in requests) == self.num_tokens, (
            "waiting tokens are miscounted"
        )
        assert sum(request.num_attended_estimate for request in requests) == self.num_attended, (
            "what waiting tokens attend to is miscounted"
        )
        claims = [block_hash for request in requests for block_hash in request.claims]
        assert len(claims) == len(set(claims)), "a block is claimed twice"
        assert set(claims) == self._claimed, "claimed blocks are miscounted"

    def _claim(self, request: RequestState, num_cached: int) -> int:
        """Note the blocks that the request will be the first to compute; return tokens that others claim before it."""
        if not self._caches_prefixes:
            return 0
        hashes = self._cache.uncached_hashes(request, num_cached)
        num_claimed = sum(1 for _ in takewhile(self._claimed.__contains__, hashes))
        request.claims = [
            block_hash for block_hash in hashes[num_claimed:] if block_hash not in self._claimed
        ]
        self._claimed.update(request.claims)
        return num_claimed * self._block_size
