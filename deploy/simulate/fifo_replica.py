"""A textbook replica, to compare policies with published figures: one prompt after the other, no surprises.

Where it differs from the engine: prompts are prefilled one at a time and in order, and what is left of a step's
token budget stays unused; a request is admitted when prompt *and* output fit beside those of all admitted
ones, so nothing is ever preempted; cached blocks do not compete with running requests for memory (an LRU list
of their own, as large as the pool); a prompt's blocks can be found when its prefill has ended, not before;
output blocks are not cached; the next step is planned when the last one has ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from deploy.simulate.messages import Begun, Report, SimulatedRequest
from deploy.simulate.replica_model import ReplicaModel
from workers.engine.cache_log import CacheLog
from workers.engine.errors import PromptTooLong
from workers.engine.outputs import Load, Queued


@dataclass(slots=True)
class _Entry:
    """A request that is here."""

    request: SimulatedRequest
    num_reserved_blocks: int
    num_uncached_tokens: int
    """Left to compute; an estimate until its prefill begins."""
    num_cached_tokens: int = 0


class FifoReplica:
    """First come, first served; one prefill beside all decodes."""

    def __init__(self, model: ReplicaModel, block_size: int) -> None:
        self._cost = model.cost(block_size)
        self._budget = model.max_num_batched_tokens
        self._max_num_seqs = model.max_num_seqs
        self._block_size = block_size
        self._num_blocks = model.num_blocks(block_size)
        self._num_reserved_blocks = 0
        self._waiting: deque[_Entry] = deque()
        self._coming: Counter[bytes] = Counter()
        """Blocks of waiting requests and of the one in prefill: cached before a later request's turn."""
        self._num_queued_tokens = 0
        self._prefill: _Entry | None = None
        self._chunk = 0
        self._decodes: list[tuple[int, int, _Entry]] = []
        """A heap by the step that ends each."""
        self._num_context_tokens = 0
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""
        self._log = CacheLog()
        self._num_steps = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self._next_s: float | None = None

    @property
    def next_s(self) -> float | None:
        """When the step that runs now ends; None while it is idle."""
        return self._next_s

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Put a request last in line.

        Raises:
            PromptTooLong: prompt and output exceed the pool.
        """
        traced = request.traced
        num_tokens = traced.num_prompt_tokens + traced.num_output_tokens
        num_reserved = -(-num_tokens // self._block_size)
        if num_reserved > self._num_blocks:
            raise PromptTooLong(
                f"request {request.request_id} has {num_tokens:,} tokens, the KV cache holds "
                f"{self._num_blocks * self._block_size:,}"
            )
        num_blocks = 0
        for block_hash in traced.hashes:
            if block_hash not in self._cached and block_hash not in self._coming:
                break
            num_blocks += 1
        entry = _Entry(request, num_reserved, self._num_uncached(request, num_blocks))
        self._waiting.append(entry)
        self._coming.update(traced.hashes)
        self._num_queued_tokens += entry.num_uncached_tokens
        if self._next_s is None:
            self._begin(now_s)

    def advance(self) -> Report:
        """End the step that runs now and begin the next."""
        assert self._next_s is not None, "an idle replica has no step to end"
        now_s = self._next_s
        self._num_steps += 1
        ended, begun = [], []
        self._num_context_tokens += len(self._decodes)
        self._num_output_tokens += len(self._decodes)
        while self._decodes and self._decodes[0][0] <= self._num_steps:
            entry = heappop(self._decodes)[2]
            ended.append(entry.request.request_id)
            self._leave(entry)
        entry_done = self._end_chunk()
        if entry_done is not None:
            traced = entry_done.request.traced
            begun.append(Begun(entry_done.request.request_id, entry_done.num_cached_tokens))
            self._num_output_tokens += 1
            self._num_context_tokens += traced.num_prompt_tokens
            if traced.num_output_tokens > 1:
                last = self._num_steps + traced.num_output_tokens - 1
                heappush(self._decodes, (last, entry_done.request.number, entry_done))
            else:
                ended.append(entry_done.request.request_id)
                self._leave(entry_done, num_generated=0)
        report = Report(self._load(), self._log.drain(), begun, ended)
        self._begin(now_s)
        return report

    def queued(self, least_wait_s: float) -> list[Queued]:
        """Requests in line; what their tokens read costs nothing here."""
        num_tokens = self._prefill.num_uncached_tokens if self._prefill is not None else 0
        num_requests = len(self._decodes) + (self._prefill is not None)
        found = []
        for entry in self._waiting:
            if self._cost.queue_s(num_tokens, 0) >= least_wait_s or num_requests >= self._max_num_seqs:
                request_id = entry.request.request_id
                found.append(Queued(request_id, entry.num_uncached_tokens, num_tokens, 0, num_requests))
            num_tokens += entry.num_uncached_tokens
            num_requests += 1
        return found

    def release(self, request_id: str) -> Report | None:
        """Give a request back that has not begun; None: it has."""
        entry = next((one for one in self._waiting if one.request.request_id == request_id), None)
        if entry is None:
            return None
        self._waiting.remove(entry)
        self._coming.subtract(entry.request.traced.hashes)
        self._coming += Counter()  # those that nobody brings are gone
        self._num_queued_tokens -= entry.num_uncached_tokens
        return Report(self._load(), self._log.drain(), [], [])

    def abandon(self) -> dict[str, int]:
        """Die: requests that were here, and how many tokens each had."""
        self._next_s = None
        tokens = {entry.request.request_id: 0 for entry in self._waiting}
        if self._prefill is not None:
            tokens[self._prefill.request.request_id] = 0
        for last_step, _, entry in self._decodes:
            tokens[entry.request.request_id] = entry.request.traced.num_output_tokens - (
                last_step - self._num_steps
            )
        return tokens

    def check(self) -> None:
        """Raise ``AssertionError`` if sums and contents disagree."""
        here = [*self._waiting, *([self._prefill] if self._prefill else [])]
        assert self._num_queued_tokens == sum(entry.num_uncached_tokens for entry in here), "queue miscounted"
        assert self._coming == Counter(h for entry in here for h in entry.request.traced.hashes)
        admitted = [entry for _, _, entry in self._decodes] + ([self._prefill] if self._prefill else [])
        assert self._num_reserved_blocks == sum(entry.num_reserved_blocks for entry in admitted)
        assert self._num_reserved_blocks <= self._num_blocks, "more is reserved than there is"
        assert len(self._cached) <= self._num_blocks, "the cache outgrew the pool"

    def _begin(self, now_s: float) -> None:
        """Start a step at ``now_s`` if there is anything to compute."""
        if self._prefill is None:
            self._admit()
        self._chunk = min(self._budget, self._prefill.num_uncached_tokens) if self._prefill else 0
        if not self._chunk and not self._decodes:
            self._next_s = None
            return
        num_context = self._num_context_tokens if self._cost.per_context_token_s else 0
        self._next_s = now_s + self._cost.step_s(len(self._decodes), self._chunk, num_context)

    def _admit(self) -> None:
        """Take the first in line into prefill, if a seat and blocks for all of it are free."""
        if not self._waiting or len(self._decodes) >= self._max_num_seqs:
            return
        entry = self._waiting[0]
        if self._num_reserved_blocks + entry.num_reserved_blocks > self._num_blocks:
            return
        self._waiting.popleft()
        self._num_reserved_blocks += entry.num_reserved_blocks
        hashes = entry.request.traced.hashes
        num_blocks = 0
        for block_hash in hashes:
            if block_hash not in self._cached:
                break
            num_blocks += 1
        for block_hash in hashes[:num_blocks]:
            self._cached.move_to_end(block_hash)
        num_uncached = self._num_uncached(entry.request, num_blocks)
        self._num_queued_tokens += num_uncached - entry.num_uncached_tokens
        entry.num_uncached_tokens = num_uncached
        num_prompt = entry.request.traced.num_prompt_tokens
        entry.num_cached_tokens = num_prompt - num_uncached
        self._num_prompt_tokens += num_prompt
        self._num_cached_tokens += entry.num_cached_tokens
        self._prefill = entry

    def _end_chunk(self) -> _Entry | None:
        """Count a computed chunk; the request, if that was its last one."""
        entry = self._prefill
        if entry is None:
            return None
        entry.num_uncached_tokens -= self._chunk
        self._num_queued_tokens -= self._chunk
        if entry.num_uncached_tokens:
            return None
        self._prefill = None
        hashes = entry.request.traced.hashes
        self._coming.subtract(hashes)
        for block_hash in hashes:
            if self._coming[block_hash] <= 0:
                del self._coming[block_hash]
        for block_hash in reversed(hashes):  # of a chain, the tail is the first to be evicted
            if block_hash not in self._cached:
                self._cached[block_hash] = None
                self._log.stored(block_hash)
            self._cached.move_to_end(block_hash)
        while len(self._cached) > self._num_blocks:
            self._log.evicted(self._cached.popitem(last=False)[0])
        return entry

    def _leave(self, entry: _Entry, num_generated: int | None = None) -> None:
        """A request has ended: free what was reserved for it."""
        traced = entry.request.traced
        self._num_reserved_blocks -= entry.num_reserved_blocks
        if num_generated is None:
            num_generated = traced.num_output_tokens - 1
        self._num_context_tokens -= traced.num_prompt_tokens + num_generated

    def _num_uncached(self, request: SimulatedRequest, num_blocks: int) -> int:
        """At least the last token is computed: its logits are needed."""
        num_prompt = request.traced.num_prompt_tokens
        return max(1, num_prompt - num_blocks * self._block_size)

    def _load(self) -> Load:
        return Load(
            num_running=len(self._decodes) + (self._prefill is not None),
            num_waiting=len(self._waiting),
            num_queued_tokens=self._num_queued_tokens,
            num_free_blocks=self._num_blocks - self._num_reserved_blocks,
            num_blocks=self._num_blocks,
            num_context_tokens=self._num_context_tokens,
            kv_waste=0.0,
            num_preemptions=0,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            cost=self._cost,
        )
