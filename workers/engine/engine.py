"""The brain of one replica: requests in, plans out; results in, tokens out.

Synchronous and deterministic: no clock, no randomness, no I/O. One turn of whoever drives it:

    while (plan := engine.plan(now_s)) is not None:   # up to ``run_ahead`` steps beyond the awaited one
        executor.launch(plan)
    outputs = engine.apply(executor.collect(), now_s)

Every plan handed out must be launched, in order, and every result applied, in order. With 256 requests decoding,
``plan`` and ``apply`` take 0.34 ms together (Python 3.11, one core of a 2-core virtual machine).
"""

from __future__ import annotations

import sys
from collections import deque

import msgspec

from workers.engine.admission import max_len_of, validate
from workers.engine.beam_group import BeamGroup
from workers.engine.beam_search import BeamSearch
from workers.engine.config import EngineConfig
from workers.engine.constraint import Constraint, Matcher, late_masks_of
from workers.engine.cost_model import CostFit, CostModel, attended
from workers.engine.draft import LaunchedStep
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import CacheEvents, CacheSnapshot, Load, Queued, TokenOutput
from workers.engine.plan import NONE_ALLOWED, LateMasks, StepPlan, StepResult, TokenLogprobs
from workers.engine.policy import Turn, make_policy
from workers.engine.queue_listing import list_queued
from workers.engine.request import EngineRequest, FinishReason
from workers.engine.request_state import RequestState, Status
from workers.engine.scheduler import Scheduler


class Engine:
    """Takes up requests, plans steps, turns their results into outputs."""

    def __init__(self, config: EngineConfig, cost: CostModel | None = None) -> None:
        """Start idle, with the cost model's guess unless measured coefficients are given."""
        self.config = config
        self._fit = CostFit(cost or CostModel())
        self._policy = make_policy(config)
        self._scheduler = Scheduler(config)
        self._queues = self._scheduler.queues
        self._requests: dict[str, RequestState] = {}
        self._launched: deque[LaunchedStep] = deque()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self.last_progress_s: float | None = None
        """When a result was last applied; None before the first."""

    @property
    def has_work(self) -> bool:
        """True while a request has not ended, a launched step is not applied or a copy not known to be done."""
        return bool(self._requests or self._launched or self._scheduler.cache.host.has_copies)

    @property
    def has_requests(self) -> bool:
        """True while a request has not ended, or a launched step is not applied: a plan may be more than a wait."""
        return bool(self._requests or self._launched)

    @property
    def cost(self) -> CostModel:
        """What steps and copies cost here, as measured so far."""
        return self._fit.cost

    @property
    def step_error_p50(self) -> float:
        """Median error of the cost model over the last hundred steps."""
        return self._fit.step_error_p50

    @property
    def num_launched(self) -> int:
        """Plans handed out whose results have not been applied."""
        return len(self._launched)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled since start."""
        return self._num_output_tokens

    @property
    def num_steps(self) -> int:
        """Results applied since start."""
        return self._num_steps

    def add(self, request: EngineRequest, now_s: float, matcher: Matcher | None = None) -> TokenOutput | None:
        """Take up a request; one with a grammar comes with a fresh matcher of it.

        Returns None, or the one output of a request whose earlier output already ends it.

        Raises:
            InvalidRequest: a field has a value that cannot be served, or the id is in use.
            PromptTooLong: it can never fit the context or the pool. Nothing has changed either way.
        """
        validate(request, self.config)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        turn = self._policy.turn(request, self._num_arrivals)
        state = self._state(request, turn, now_s)
        self._num_arrivals += request.params.num_rows
        if request.params.has_constraint:
            state.constraint = _replayed(request, matcher)
        if request.output_token_ids:
            finish_reason = _finish_reason(state, request.output_token_ids[-1])
            if finish_reason is not None:
                return _output(state, [], finish_reason, None)
        if request.params.beams is not None:
            others = range(1, request.params.num_rows)
            _group([state, *(self._state(request, (turn[0], turn[1] + index), now_s) for index in others)])
        self._requests[request.request_id] = state
        self._queues.enqueue(state)
        return None

    def abort(self, request_id: str) -> bool:
        """End a request; nothing further is reported of it. False if there is no such request."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._queues.dismiss(state)
        self._policy.ended(state.request, state.num_output_tokens)
        return True

    def release(self, request_id: str) -> bool:
        """Give a request back of which nothing has been computed; nothing further is reported of it.

        False, and nothing changes, if it has begun or there is no such request.
        """
        state = self._requests.get(request_id)
        if state is None or not self._queues.release(state):
            return False
        del self._requests[request_id]
        self._policy.released(state.request)
        return True

    def plan(self, now_s: float) -> StepPlan | None:
        """Hand out the next plan; None if enough steps are launched or there is nothing to compute now."""
        if len(self._launched) > self.config.run_ahead:
            return None
        late_masks = self._late_masks()
        scheduled = None
        if self._requests or late_masks is not None:
            scheduled = self._scheduler.schedule(now_s, self.cost, late_masks)
        if scheduled is None and not self._launched:
            scheduled = self._scheduler.await_copies(self.cost)
        if scheduled is None:
            return None
        plan, launched = scheduled
        self._launched.append(launched)
        return plan

    def apply(self, result: StepResult, now_s: float) -> list[TokenOutput]:
        """Take in the result of the oldest plan launched and return what it says to each request."""
        step = self._launched.popleft()
        assert result.step_id == step.step_id, f"awaited step {step.step_id}, got {result.step_id}"
        assert len(result.token_ids) == len(step.sampling), (
            f"step {step.step_id} samples {len(step.sampling)} tokens, got {len(result.token_ids)}"
        )
        block_size, cache = self.config.block_size, self._scheduler.cache
        finished = Status.FINISHED
        outputs: list[TokenOutput] = []
        logprobs, pooled, scored = result.logprobs, result.pooled, result.prompt_logprobs
        groups: list[BeamGroup] = []
        num_sampled = 0
        for index, (request, token_id) in enumerate(zip(step.sampling, result.token_ids, strict=True)):
            request.num_in_flight -= 1
            if request.status is finished:
                continue  # aborted, or ended a step ago: this is the token too many
            if token_id < 0:
                outputs.append(_without_token(request.payer, token_id))
                self._dismiss(request.payer)
                continue
            num_sampled += 1
            if (group := request.group) is not None:
                told = logprobs[index] if logprobs else None
                assert told is not None, "ranks tell a beam search what is likely"
                if request.status is Status.RUNNING:
                    group.note(request, told)
                    if group.is_complete:
                        groups.append(group)
                continue
            request.token_ids.append(token_id)
            num_known = len(request.token_ids)
            finish_reason = None
            if request.constraint is not None and not request.stops_at(token_id):
                request.constraint.accept(token_id)
                if request.constraint.error is not None:
                    outputs.append(_failure(request, request.constraint.error, "grammar"))
                    self._dismiss(request)
                    continue
                finish_reason = _finish_reason(request, token_id)
            elif token_id in request.stop_token_ids or num_known >= request.max_len:
                finish_reason = _finish_reason(request, token_id)
            outputs.append(
                _output(
                    request,
                    [token_id],
                    finish_reason,
                    logprobs[index] if logprobs else None,
                    pooled[index] if pooled else None,
                    scored[index] if scored else None,
                )
            )
            if num_known % block_size == 0:
                cache.register(request)
            if finish_reason is not None:
                self._dismiss(request)
        self._scheduler.complete(result)
        outputs += [output for group in groups if (output := self._advance(group)) is not None]
        self._num_steps += 1
        self._num_output_tokens += num_sampled
        self.last_progress_s = now_s
        self._fit.observe_step(result.elapsed_s, step.work)
        self._fit.observe_copies(result.copied_s, result.num_copied_blocks)
        return outputs

    def _state(self, request: EngineRequest, turn: Turn, now_s: float) -> RequestState:
        return RequestState(request, turn, max_len_of(request, self.config), self.config.eos_token_ids, now_s)

    def _advance(self, group: BeamGroup) -> TokenOutput | None:
        """Let a search choose how its beams go on; return its output if it has ended."""
        before, leader = group.beams, group.leader
        steps = group.advance()
        if not group.search.is_done:
            self._scheduler.rearrange(group, before, steps)
            return None
        beams = group.search.outputs()
        self._dismiss(leader)
        reason = beams[0].finish_reason if beams else FinishReason.LENGTH
        return msgspec.structs.replace(_output(leader, [], reason, None), beams=beams, stop_token_id=None)

    def _late_masks(self) -> LateMasks | None:
        """Masks that the oldest launched step still waits for; all tokens before it are known. None if it does not."""
        if not self._launched or not self._launched[0].deferred:
            return None
        step = self._launched[0]
        masks = late_masks_of(step.sampling, step.deferred)
        step.deferred = []
        return LateMasks(step.step_id, masks)

    def _dismiss(self, request: RequestState) -> None:
        del self._requests[request.request_id]
        self._queues.dismiss(request)
        self._policy.ended(request.request, request.num_output_tokens)

    def load(self) -> Load:
        """How busy the engine is now."""
        scheduler, queues, cache = self._scheduler, self._queues, self._scheduler.cache
        num_context, num_slots = 0, 0
        num_queued, num_attended = queues.work.num_tokens, queues.work.num_attended
        for request in queues.running:
            num_computed = request.num_computed
            num_context += num_computed
            num_slots += request.num_slots
            num_lag = len(request.token_ids) + request.num_in_flight - num_computed
            if num_lag > 1:
                num_queued += num_lag
                num_attended += attended(num_lag, num_computed)
        for step in self._launched:
            num_queued += step.work.num_prefill_tokens
            num_attended += step.work.num_attended
        for request in queues.loading:
            num_queued += request.num_lag
            num_attended += attended(request.num_lag, request.num_computed)
        return Load(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.loading),
            num_queued_tokens=num_queued,
            num_free_blocks=cache.num_free_blocks,
            num_blocks=cache.num_blocks,
            num_context_tokens=num_context,
            kv_waste=1 - num_context / num_slots if num_slots else 0.0,
            num_preemptions=scheduler.room.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            cost=self.cost,
            num_swap_preemptions=scheduler.room.num_swap_preemptions,
            num_blocks_swapped_out=cache.host.num_blocks_out,
            num_blocks_swapped_in=cache.host.num_blocks_in,
            num_corrupt_blocks=cache.host.num_corrupt,
            num_host_blocks=cache.host.num_blocks,
            num_free_host_blocks=cache.host.num_free_blocks,
            num_host_cached_tokens=scheduler.num_host_cached_tokens,
            num_forked_blocks=cache.num_forked_blocks,
            num_tail_copies=cache.num_tail_copies,
            step_error_p50=self.step_error_p50,
            num_queued_attended=num_attended,
        )

    def queued(self, prefix: str = "", least_wait_s: float = 0.0, most: int = sys.maxsize) -> list[Queued]:
        """The first requests in line whose ids begin with ``prefix`` and that will wait long (``list_queued``)."""
        return list_queued(self._queues, self.load(), self.config.max_num_seqs, prefix, least_wait_s, most)

    def drain_cache_events(self) -> CacheEvents | None:
        """Changes of the prefix cache since the last call; None if there are none."""
        return self._scheduler.cache.drain_events()

    def cache_snapshot(self) -> CacheSnapshot:
        """All hashes as of the last ``drain_cache_events``."""
        return self._scheduler.cache.snapshot()

    def check(self) -> None:
        """Raise ``AssertionError`` if the engine's books do not agree; for tests and debugging."""
        queues = self._queues
        queues.check()
        queued = (*queues.waiting, *queues.loading, *queues.running)
        num_queued = sum(request.payer is request for request in queued)
        assert num_queued == len(self._requests), "a request neither waits, loads nor runs"
        in_flight = [request for step in self._launched for request in step.sampling]
        for request in queued:
            num_in_flight = in_flight.count(request)
            assert request.num_in_flight == num_in_flight, (
                f"request {request.request_id} miscounts its flight"
            )


def _group(members: list[RequestState]) -> BeamGroup:
    """The search that the members, all of one request, are the beams of."""
    leader = members[0]
    beams = leader.request.params.beams
    assert beams is not None, "only a beam search has beams"
    for member in members[1:]:
        member.status = Status.HELD
    num_prompt_tokens = leader.num_prompt_tokens
    search = BeamSearch(
        beams,
        num_prompt_tokens,
        leader.max_len - num_prompt_tokens,
        leader.request.params.min_tokens,
        leader.stop_token_ids,
    )
    return BeamGroup(search, members)


def _finish_reason(request: RequestState, token_id: int) -> FinishReason | None:
    """Why the request ends with ``token_id``, the last one known; None if it goes on."""
    if request.stops_at(token_id) or (request.constraint is not None and request.constraint.is_complete):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.max_len else None


def _output(
    request: RequestState,
    token_ids: list[int],
    finish_reason: FinishReason | None,
    logprobs: TokenLogprobs | None,
    pooled: bytes | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
) -> TokenOutput:
    """What one step says to one request; the first output tells also how it began."""
    is_first = not request.reported
    request.reported = True
    last = request.token_ids[-1]
    stop_token_id = last if finish_reason is FinishReason.STOP and last in request.stop_token_ids else None
    return TokenOutput(
        request.request.request_id,
        token_ids,
        finish_reason,
        stop_token_id,
        None if logprobs is None else [logprobs],
        request.num_cached_tokens if is_first else None,
        request.num_preemptions,
        waited_s=request.waited_s if is_first else None,
        pooled=pooled,
        num_host_cached_tokens=request.num_host_cached_tokens if is_first else 0,
        prompt_logprobs=prompt_logprobs if is_first else None,
    )


def _replayed(request: EngineRequest, matcher: Matcher | None) -> Constraint:
    """What limits a request, after the output that it already has.

    Raises:
        InvalidRequest: there is no matcher of its grammar, or its output does not match.
    """
    if request.params.grammar and matcher is None:
        raise InvalidRequest(
            "this model's replicas cannot follow a grammar: they have no vocabulary", param="grammar"
        )
    constraint = Constraint(matcher, request.params)
    for token_id in request.output_token_ids:
        constraint.accept(token_id)
    if constraint.error is not None:
        raise InvalidRequest(
            f"earlier output does not match the grammar: {constraint.error}", param="grammar"
        )
    return constraint


def _without_token(request: RequestState, code: int) -> TokenOutput:
    """No token could be sampled; ``code`` says why, as ``StepResult.token_ids`` does."""
    wishes = request.request.params.restrictions
    if wishes and code == NONE_ALLOWED:
        return _failure(
            request, f"{' and '.join(wishes)} left no token that may come next: allow one more", wishes[0]
        )
    return _failure(
        request,
        "the model's logits are no finite numbers: its weights hold NaN or infinity, or its activations go beyond the "
        "numbers of --dtype; check the checkpoint, or try another --dtype",
        None,
    )


def _failure(request: RequestState, message: str, param: str | None) -> TokenOutput:
    """The end of a request by its caller's mistake, with the field at fault, or by ours."""
    return TokenOutput(
        request.request_id,
        [],
        FinishReason.ERROR,
        num_preemptions=request.num_preemptions,
        error=message,
        error_param=param,
        is_user_error=param is not None,
    )
