"""Which requests compute how many tokens in the next step.

One rule: a request has tokens known and tokens computed, and each step hands a token budget to requests whose
computed lags known. Decoding requests first, then prompts already begun, then waiting ones. Chunked prefill,
prefix hits and resuming after a preemption are all this rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.engine.config import EngineConfig
from workers.engine.errors import OutOfBlocks
from workers.engine.kv_cache import KVCache
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request_queue import RequestQueue
from workers.engine.request_state import NO_ROW, RequestState, Status

_NO_BLOCKS: list[int] = []


@dataclass(slots=True)
class LaunchedStep:
    """What the brain remembers of a plan until its result comes."""

    step_id: int
    sampling: list[RequestState]
    """In the order of the result's tokens."""
    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int
    """KV tokens that the decoding requests read."""


@dataclass(slots=True)
class _Columns:
    """Scheduled rows in the making, column by column as ``StepPlan`` wants them."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    sampling: list[RequestState] = field(default_factory=list)


class _Draft:
    """A plan in the making."""

    __slots__ = ("budget", "decodes", "is_starved", "new_rows", "num_promised_blocks", "prefills", "step_id")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        """Tokens that may still be scheduled."""
        self.new_rows: list[NewRow] = []
        self.decodes = _Columns()
        self.prefills = _Columns()
        self.num_promised_blocks = 0
        """Blocks that running requests still need for tokens they already have."""
        self.is_starved = False
        """True once a running request went without the blocks it needs."""

    def finish(self) -> tuple[StepPlan, LaunchedStep] | None:
        """The plan and what to remember of it; None if nothing was scheduled."""
        decodes, prefills = self.decodes, self.prefills
        if not decodes.rows and not prefills.rows:
            return None
        plan = StepPlan(
            self.step_id,
            self.new_rows,
            decodes.rows + prefills.rows,
            decodes.starts + prefills.starts,
            decodes.num_tokens + prefills.num_tokens,
            decodes.samples + prefills.samples,
            decodes.new_block_ids + prefills.new_block_ids,
        )
        launched = LaunchedStep(
            self.step_id,
            decodes.sampling + prefills.sampling,
            len(decodes.rows),
            sum(prefills.num_tokens),
            sum(decodes.starts),
        )
        return plan, launched


class Scheduler:
    """Queues, rows and the making of plans. Requests enter by ``enqueue`` and leave by ``dismiss``."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._cache = KVCache(config)
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._next_step_id = 0
        self.num_waiting_tokens = 0
        """Tokens that waiting requests will have to compute, as far as can be told."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of admitted requests, since start."""
        self.num_cached_tokens = 0
        """Of ``num_prompt_tokens``, found in the prefix cache."""

    @property
    def cache(self) -> KVCache:
        """The blocks of all requests."""
        return self._cache

    @property
    def waiting(self) -> RequestQueue:
        """Requests without a row, preempted ones included."""
        return self._waiting

    @property
    def running(self) -> RequestQueue:
        """Requests with a row."""
        return self._running

    def enqueue(self, request: RequestState) -> None:
        """Let a request wait for its turn."""
        num_known = len(request.token_ids) + request.num_in_flight
        num_cached = len(self._cache.find_prefix(request)) * self._config.block_size
        request.num_uncached_estimate = num_known - num_cached
        self.num_waiting_tokens += request.num_uncached_estimate
        request.status = Status.WAITING
        self._waiting.add(request)

    def dismiss(self, request: RequestState) -> None:
        """Take out a request that has ended; its blocks are free once no launched step touches them."""
        if request.status is Status.RUNNING:
            self._leave_batch(request)
        elif request.status is Status.WAITING:
            self._leave_waiting(request)
        request.status = Status.FINISHED

    def schedule(self, now_s: float) -> tuple[StepPlan, LaunchedStep] | None:
        """Make the next plan, or None if no request can compute anything now."""
        draft = _Draft(self._next_step_id, self._config.max_num_batched_tokens)
        begun = self._schedule_decodes(draft)
        self._schedule_prefills(draft, begun)
        self._admit(draft, now_s)
        finished = draft.finish()
        if finished is not None:
            self._next_step_id += 1
        return finished

    def check(self) -> None:
        """Raise ``AssertionError`` if queues, rows and blocks do not agree."""
        self._waiting.check()
        self._running.check()
        self._cache.check(self._requests())
        rows = [request.row for request in self._running] + self._free_rows
        assert sorted(rows) == list(range(self._config.max_num_seqs)), "a row is lost or taken twice"
        num_waiting_tokens = sum(request.num_uncached_estimate for request in self._waiting)
        assert num_waiting_tokens == self.num_waiting_tokens, "waiting tokens are miscounted"
        for request in self._waiting:
            assert request.status is Status.WAITING, (
                f"request {request.request_id} waits but is {request.status}"
            )
            assert request.row == NO_ROW, f"request {request.request_id} waits but has a row"
            assert not request.block_ids, f"request {request.request_id} waits but holds blocks"
        for request in self._running:
            assert request.status is Status.RUNNING, (
                f"request {request.request_id} runs but is {request.status}"
            )
            assert request.num_lag >= 1, f"request {request.request_id} computed tokens that do not exist"

    # Running requests

    def _schedule_decodes(self, draft: _Draft) -> list[RequestState]:
        """Schedule every request that lags by one token; return those that lag by more.

        The hot path of the brain: one pass, plain lists, no call per request but where a block is full.
        """
        columns, step_id, block_size = draft.decodes, draft.step_id, self._config.block_size
        add_row, add_start, add_blocks = (
            columns.rows.append,
            columns.starts.append,
            columns.new_block_ids.append,
        )
        add_request = columns.sampling.append
        running = Status.RUNNING
        begun: list[RequestState] = []
        budget = draft.budget
        for request in self._running.copy():
            if request.status is not running:
                continue  # preempted for an earlier one
            start = request.num_computed
            num_known = len(request.token_ids) + request.num_in_flight
            if num_known - start != 1:
                begun.append(request)
                continue
            if num_known >= request.max_len or not budget:
                continue
            new_block_ids = _NO_BLOCKS
            if start == request.num_slots:
                grown = self._grow(request, num_known, draft)
                if grown is None:
                    continue
                new_block_ids = grown
            budget -= 1
            request.num_computed = num_known
            request.num_in_flight += 1
            request.last_step_id = step_id
            add_row(request.row)
            add_start(start)
            add_blocks(new_block_ids)
            add_request(request)
            if num_known % block_size == 0:
                self._cache.register(request)
        draft.budget = budget
        columns.num_tokens = [1] * len(columns.rows)
        columns.samples = [True] * len(columns.rows)
        return begun

    def _schedule_prefills(self, draft: _Draft, begun: list[RequestState]) -> None:
        """Go on with prompts that were admitted in earlier steps."""
        for request in begun:
            if request.status is not Status.RUNNING:
                continue
            if draft.budget:
                num_tokens = min(request.num_lag, draft.budget)
                new_block_ids = self._grow(request, request.num_computed + num_tokens, draft)
                if new_block_ids is not None:
                    self._put(draft, request, num_tokens, new_block_ids)
            draft.num_promised_blocks += self._num_owed_blocks(request)

    def _grow(self, request: RequestState, num_tokens: int, draft: _Draft) -> list[int] | None:
        """Make room for ``num_tokens``, by preemption if it must be; None if that has to wait for a step."""
        while True:
            try:
                return self._cache.extend(request, num_tokens)
            except OutOfBlocks:
                if self._cache.is_retiring or not self._preempt_for(request, draft.step_id):
                    draft.is_starved = True
                    return None

    def _preempt_for(self, request: RequestState, step_id: int) -> bool:
        """Send back to waiting the last in turn behind ``request`` that this plan has not scheduled.

        Those preempted ``max_preemptions`` times are spared while there is another: counts only grow, and
        where all are spent the turns decide alone, so the first in turn always gets through.
        """
        spent: RequestState | None = None
        for victim in reversed(self._running):
            if victim is request:
                break
            if victim.last_step_id == step_id:
                continue
            if victim.is_exhausted:
                return False  # it ends with the next result, and gives back its blocks by itself
            if victim.num_preemptions < self._config.max_preemptions:
                self._preempt(victim)
                return True
            spent = spent or victim
        if spent is None:
            return False
        self._preempt(spent)
        return True

    def _preempt(self, request: RequestState) -> None:
        """Take row and blocks; tokens stay, one in flight included, and are computed again later."""
        self._leave_batch(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.enqueue(request)

    # Waiting requests

    def _admit(self, draft: _Draft, now_s: float) -> None:
        """Give rows to waiting requests in turn, while budget, rows and blocks last.

        A request is admitted if all tokens it has fit beside what was promised to others, so a prompt once
        begun seldom runs dry half way.
        """
        while self._waiting and self._free_rows and draft.budget and not draft.is_starved:
            request = self._waiting.first
            if request.num_in_flight:
                return  # preempted a step ago: which token it sampled is told by the next result
            num_spare = draft.num_promised_blocks + (
                self._config.num_watermark_blocks if self._running else 0
            )
            prefix = self._cache.find_prefix(request)
            if not self._cache.can_adopt(prefix, len(request.token_ids), num_spare):
                return
            self._enter_batch(draft, request, prefix, now_s)
            num_tokens = min(request.num_lag, draft.budget)
            new_block_ids = self._cache.extend(request, request.num_computed + num_tokens)
            self._put(draft, request, num_tokens, prefix + new_block_ids)
            draft.num_promised_blocks += self._num_owed_blocks(request)

    def _put(self, draft: _Draft, request: RequestState, num_tokens: int, new_block_ids: list[int]) -> None:
        """Write one request into the draft."""
        samples = num_tokens == request.num_lag
        columns = draft.decodes if samples and num_tokens == 1 else draft.prefills
        columns.rows.append(request.row)
        columns.starts.append(request.num_computed)
        columns.num_tokens.append(num_tokens)
        columns.samples.append(samples)
        columns.new_block_ids.append(new_block_ids)
        draft.budget -= num_tokens
        request.num_computed += num_tokens
        request.last_step_id = draft.step_id
        if samples:
            request.num_in_flight += 1
            columns.sampling.append(request)
        self._cache.register(request)

    def _num_owed_blocks(self, request: RequestState) -> int:
        """Blocks it lacks for the tokens that it has."""
        return self._cache.blocks_for(len(request.token_ids)) - len(request.block_ids)

    # Coming and going

    def _enter_batch(self, draft: _Draft, request: RequestState, prefix: list[int], now_s: float) -> None:
        self._leave_waiting(request)
        self._cache.adopt(request, prefix)
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        self._running.add(request)
        draft.new_rows.append(
            NewRow(request.row, request.token_ids.copy(), request.num_prompt_tokens, request.request.params)
        )
        if request.waited_s is None:
            request.waited_s = now_s - request.queued_s
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens

    def _leave_batch(self, request: RequestState) -> None:
        self._running.remove(request)
        self._cache.retire(request)
        self._free_rows.append(request.row)
        request.row = NO_ROW

    def _leave_waiting(self, request: RequestState) -> None:
        self._waiting.remove(request)
        self.num_waiting_tokens -= request.num_uncached_estimate

    def _requests(self) -> Iterator[RequestState]:
        yield from self._running
        yield from self._waiting
