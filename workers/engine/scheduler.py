"""Which requests compute how many tokens in the next step.

One rule: a request has tokens known and tokens computed, and each step hands a token budget to requests whose
computed lags known. Decoding requests first, then prompts already begun, then waiting ones. Chunked prefill,
prefix hits and resuming after a preemption are all this rule. Requests whose blocks are on their way from the host
join once they are there; others compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.admission import most_blocks
from workers.engine.beam_group import BeamGroup
from workers.engine.beam_search import Step
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.draft import Draft, LaunchedStep
from workers.engine.kv_cache import KVCache, can_fork
from workers.engine.making_room import RoomMaker
from workers.engine.plan import LateMasks, StepPlan, StepResult
from workers.engine.preemption import worth_keeping, worth_loading
from workers.engine.queues import Queues
from workers.engine.request_state import RequestState, Status

_NO_BLOCKS: list[int] = []


class Scheduler:
    """The making of plans, from ``queues``, which requests enter and leave."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._cache = KVCache(config)
        self.queues = Queues(config, self._cache)
        """Where each request stands."""
        self.room = RoomMaker(config, self._cache, self.queues)
        """Who gave way to whom, so far."""
        self._rows = self.queues.rows
        self._next_step_id = 0
        self.num_prompt_tokens = 0
        """Of admitted requests, since start."""
        self.num_cached_tokens = 0
        """Of ``num_prompt_tokens``, found in the prefix cache."""
        self.num_host_cached_tokens = 0
        """Of ``num_cached_tokens``, brought back from the host."""

    @property
    def cache(self) -> KVCache:
        """The blocks of all requests."""
        return self._cache

    def rearrange(self, group: BeamGroup, before: Sequence[RequestState], steps: Sequence[Step]) -> None:
        """Let the beams of a search go on as it has chosen."""
        self._rows.rearrange(group, before, steps)

    def schedule(
        self, now_s: float, cost: CostModel, late_masks: LateMasks | None = None
    ) -> tuple[StepPlan, LaunchedStep] | None:
        """Make the next plan, or None if there is nothing to compute or to copy now and no masks are owed."""
        config = self._config
        draft = Draft(
            self._next_step_id,
            config.max_num_batched_tokens,
            cost,
            config.replays_outputs,
            config.max_prefill_overhead,
        )
        if self._config.policy == "priority":
            self.room.make_way(draft)
        begun = self._schedule_decodes(draft)
        if self._config.max_step_growth is not None:
            draft.limit_prefills(self._config.max_step_growth)
        self._schedule_prefills(draft, begun)
        self._spread_beams(draft)
        self._enter_loaded(draft, now_s)
        self._admit(draft, now_s)
        host = self._cache.host
        is_kept = host.num_blocks and worth_keeping(host.cold.longest, cost, config)
        if is_kept and not draft.is_empty and not draft.is_starved:
            host.drift(draft.step_id, draft.num_hidden_copies)
        swap_out, swap_in = host.take_plan(draft.step_id)
        if draft.is_empty and not swap_out and not swap_in and late_masks is None:
            return None
        self._next_step_id += 1
        for group in self._rows.groups:
            group.hold()
        branches = [] if draft.is_empty else self._rows.take_branches()
        tail_copies = self._cache.take_tail_copies(draft.step_id)
        return draft.finish(swap_out, swap_in, host.copied, late_masks, branches, tail_copies)

    def await_copies(self, cost: CostModel) -> tuple[StepPlan, LaunchedStep] | None:
        """A plan without rows, whose result comes when all copies are done; None if they are."""
        if not self._cache.host.has_copies:
            return None
        draft = Draft(self._next_step_id, 0, cost)
        self._next_step_id += 1
        return draft.finish([], [], self._cache.host.copied)

    def complete(self, result: StepResult) -> None:
        """Take in which step and which copies are done."""
        if self._cache.host.has_copies:
            self._cache.host.complete(result.copied, result.corrupt_blocks)
            if result.corrupt_blocks:
                self._recompute(set(result.corrupt_blocks))
        self._cache.complete(result.step_id)

    # Running requests

    def _schedule_decodes(self, draft: Draft) -> list[RequestState]:
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
        replays_outputs = self._config.replays_outputs
        budget = draft.budget
        for request in self.queues.running.copy():
            if request.status is not running:
                continue  # preempted for an earlier one
            start = request.num_computed
            num_known = len(request.token_ids) + request.num_in_flight
            if num_known - start != 1 or (replays_outputs and start < request.num_prompt_tokens):
                begun.append(request)
                continue
            if num_known >= request.max_len or not budget or request.awaits_mask:
                continue
            new_block_ids = _NO_BLOCKS
            if start == request.num_slots:
                grown = self.room.grow(request, num_known, draft)
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

    def _schedule_prefills(self, draft: Draft, begun: list[RequestState]) -> None:
        """Go on with prompts that were admitted in earlier steps."""
        for request in begun:
            if request.status is not Status.RUNNING or request.awaits_mask:
                continue
            if draft.has_room:
                num_tokens = draft.most_tokens(request)
                new_block_ids = self.room.grow(request, request.num_computed + num_tokens, draft)
                if new_block_ids is not None:
                    self._put(draft, request, num_tokens, new_block_ids)
            draft.num_promised_blocks += self._num_owed_blocks(request)

    def _spread_beams(self, draft: Draft) -> None:
        """Let beams of preempted searches go on: they share what they have in common with their leader's tokens."""
        for group in self._rows.groups:
            leader = group.leader
            if leader.num_computed < len(leader.token_ids):
                continue
            for beam in group.beams[1:]:
                if beam.status is not Status.HELD:
                    continue
                if not draft.budget:
                    return
                self._cache.share(leader, beam, group.num_common_tokens)
                num_tokens = draft.most_tokens(beam)
                if self.room.grow(beam, beam.num_computed + num_tokens, draft) is None:
                    self._cache.retire(beam)
                    break
                self._rows.join(draft, beam)
                self._put(draft, beam, num_tokens, beam.block_ids.copy())
                draft.num_promised_blocks += self._num_owed_blocks(beam)

    def _recompute(self, corrupt_blocks: set[int]) -> None:
        """Let requests that wait for copies gone wrong start without them: none has computed with one yet."""
        for request in self.queues.loading.copy():
            if not corrupt_blocks.isdisjoint(request.block_ids):
                self._cache.drop_swapped(request)
                self.queues.unload(request)

    # Waiting requests

    def _enter_loaded(self, draft: Draft, now_s: float) -> None:
        """Give rows to requests whose blocks have their contents. Rows were kept for them, and all blocks taken."""
        for request in self.queues.loading.copy():
            if not draft.budget:
                return
            if self._cache.is_loaded(request):
                self.queues.loading.remove(request)
                self._cache.drop_swapped(request)
                self._enter_batch(draft, request, now_s)
                self._put(draft, request, draft.most_tokens(request), request.block_ids.copy())

    def _admit(self, draft: Draft, now_s: float) -> None:
        """Give rows to waiting requests in turn, while budget, rows and blocks last.

        A request is admitted if all tokens it has fit beside what was promised to others, so a prompt once
        begun seldom runs dry half way. One preempted as often as may be gets all blocks that it can ever need.
        """
        cache, queues = self._cache, self.queues
        while queues.waiting and not draft.is_starved:
            request = queues.waiting.first
            if queues.num_free_rows < request.num_rows or _num_in_flight(request):
                return  # in flight: preempted a step ago, which token it sampled is told by the next result
            if self._fork(draft, request, now_s):
                continue
            if not draft.has_room:
                return
            is_alone = not queues.running and not queues.loading
            num_spare = draft.num_promised_blocks + (0 if is_alone else self._config.num_watermark_blocks)
            is_last_time = request.num_preemptions >= self._config.max_preemptions
            found = cache.find_prefix(request)
            prefix = worth_loading(request, found, cache.host.num_copies, draft.cost, self._config)
            if prefix.host and not cache.can_swap_in(request):
                return
            num_blocks = (
                most_blocks(request.request, self._config)
                if is_last_time
                else cache.blocks_for(len(request.token_ids))
            )
            if not cache.can_adopt(prefix, num_blocks, num_spare):
                return
            queues.leave_waiting(request)
            cache.adopt(request, prefix, draft.step_id)
            if is_last_time:
                cache.reserve(request, num_blocks)
            if not request.num_preemptions:
                request.num_host_cached_tokens = (
                    request.num_computed - len(prefix.device) * self._config.block_size
                )
            if not cache.is_loaded(request):
                cache.extend(request, len(request.token_ids))
                queues.load(request)
                continue
            cache.drop_swapped(request)
            self._enter_batch(draft, request, now_s)
            num_tokens = draft.most_tokens(request)
            cache.extend(request, request.num_computed + num_tokens)
            self._put(draft, request, num_tokens, request.block_ids.copy())
            draft.num_promised_blocks += self._num_owed_blocks(request)

    def _fork(self, draft: Draft, request: RequestState, now_s: float) -> bool:
        """Let a request share all blocks of one with the same tokens that this step computes; False if there is none.

        It samples beside that one and needs a block of its own only when it writes: then the last one is copied.
        """
        source = draft.source_for(request)
        if source is None or not can_fork(request) or self._config.max_preemptions == 0:
            return False  # where none may be preempted, each gets all its blocks beforehand
        num_spare = draft.num_promised_blocks + self._config.num_watermark_blocks
        if self._cache.num_unpromised_blocks <= num_spare:
            return False
        self.queues.leave_waiting(request)
        block_ids = self._cache.fork(source, request)
        self._enter_batch(draft, request, now_s)
        draft.put_fork(source, request, block_ids)
        draft.num_promised_blocks += 1
        request.last_step_id = draft.step_id
        request.num_in_flight += 1
        return True

    def _put(self, draft: Draft, request: RequestState, num_tokens: int, new_block_ids: list[int]) -> None:
        """Write one request into the draft."""
        samples = num_tokens == request.num_lag
        draft.put(request, num_tokens, samples, new_block_ids)
        request.num_computed += num_tokens
        request.last_step_id = draft.step_id
        if samples:
            request.num_in_flight += 1
        self._cache.register(request)

    def _num_owed_blocks(self, request: RequestState) -> int:
        """Blocks it lacks for the tokens that it has."""
        return self._cache.blocks_for(len(request.token_ids)) - len(request.block_ids)

    # Coming and going

    def _enter_batch(self, draft: Draft, request: RequestState, now_s: float) -> None:
        """Give a row to a request that has its first blocks, and to the leader of a search all rows of it."""
        self._rows.enter(draft, request)
        if request.waited_s is None:
            request.waited_s = now_s - request.queued_s
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.num_host_cached_tokens += request.num_host_cached_tokens


def _num_in_flight(request: RequestState) -> int:
    return request.num_in_flight if request.group is None else request.group.num_in_flight
