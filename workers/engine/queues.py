"""Where each request stands: it waits for its turn, its blocks are on their way from the host, or it runs in a row.

What is scheduled of those that run, and who of them gives way, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.engine.batch_rows import BatchRows
from workers.engine.config import EngineConfig
from workers.engine.kv_cache import KVCache
from workers.engine.request_queue import RequestQueue
from workers.engine.request_state import NO_ROW, RequestState, Status
from workers.engine.waiting_work import WaitingWork


class Queues:
    """All requests, in three queues; none is in two."""

    def __init__(self, config: EngineConfig, cache: KVCache) -> None:
        self._num_rows = config.max_num_seqs
        self._cache = cache
        self.waiting = RequestQueue()
        """Without a row or blocks, preempted ones included."""
        self.loading = RequestQueue()
        """Without a row, but with blocks that are on their way from the host."""
        self.rows = BatchRows(config.max_num_seqs, cache)
        self.running = self.rows.running
        """With a row."""
        self.work = WaitingWork(cache, config.block_size, config.enable_prefix_caching)
        """What waiting requests will have to compute, as far as can be told."""

    @property
    def num_free_rows(self) -> int:
        """Rows that are not kept for requests whose blocks are on their way."""
        return self.rows.num_free - sum(request.num_rows for request in self.loading)

    def enqueue(self, request: RequestState) -> None:
        """Let a request wait for its turn; the leader of a search waits for all its beams."""
        self.work.add(request)
        request.status = Status.WAITING
        self.waiting.add(request)
        self._cache.host.cold.note_request(self._cache.blocks_for(len(request.token_ids)))

    def leave_waiting(self, request: RequestState) -> None:
        """Take out a request whose turn has come."""
        self.waiting.remove(request)
        self.work.remove(request)

    def load(self, request: RequestState) -> None:
        """Let a request that has left those waiting, with blocks, wait until those have their contents."""
        request.status = Status.LOADING
        self.loading.add(request)

    def unload(self, request: RequestState) -> None:
        """Take blocks and turn of a request that loads; what it has on the host it keeps."""
        self.loading.remove(request)
        self._cache.retire(request)
        self.enqueue(request)

    def dismiss(self, request: RequestState) -> None:
        """Take out a request, or a search, that has ended; blocks are free once no launched step touches them."""
        if request.status is Status.RUNNING:
            self.rows.leave(request)
        elif request.status is Status.LOADING:
            self.loading.remove(request)
            self._cache.retire(request)
        elif request.status is Status.WAITING:
            self.leave_waiting(request)
        self._cache.drop_swapped(request)
        for one in request.group.members if request.group is not None else [request]:
            one.status = Status.FINISHED

    def release(self, request: RequestState) -> bool:
        """Take out a request if it waits and has never begun; False, and nothing changes, if it has."""
        if request.status is not Status.WAITING or request.has_begun:
            return False
        claims = request.claims
        self.dismiss(request)
        if claims:
            self.work.reclaim(claims[0], request.block_hashes.index(claims[0]), self.waiting)
        return True

    def check(self) -> None:
        """Raise ``AssertionError`` if queues, rows and blocks do not agree."""
        self.waiting.check()
        self.rows.check(self._num_rows)
        self.loading.check()
        self._cache.check(self._requests())
        self.work.check(self.waiting)
        for request in self.waiting:
            assert request.status is Status.WAITING, (
                f"request {request.request_id} waits but is {request.status}"
            )
            assert request.row == NO_ROW, f"request {request.request_id} waits but has a row"
            assert not request.block_ids, f"request {request.request_id} waits but holds blocks"
        for request in self.loading:
            assert request.status is Status.LOADING, (
                f"request {request.request_id} loads but is {request.status}"
            )
            assert request.row == NO_ROW, f"request {request.request_id} loads but has a row"
            assert request.block_ids, f"request {request.request_id} loads into nothing"
        assert self.num_free_rows >= 0, "more requests load than there are rows"

    def _requests(self) -> Iterator[RequestState]:
        yield from self.running
        yield from self.loading
        yield from self.waiting
