"""A plan in the making, and what the brain remembers of it once it is launched."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from workers.engine.constraint import masks_of
from workers.engine.cost_model import CostModel, StepWork, attended
from workers.engine.plan import BlockCopy, Branch, Fork, LateMasks, NewRow, StepPlan, TailCopy
from workers.engine.request_state import RequestState

_SHARE_OF_COPIES = 0.1
"""Of a step's time; what it excludes is a burst that the host has to queue, some 10 us a block, between short steps."""


_LEAST_PREFILL_S = 1e-6
"""Of a step that decodes, whatever the cost model makes of it: prompts get on."""
_FEWEST_TOKENS = 16
"""Of a prompt in a step, however little time there is."""


@dataclass(slots=True)
class LaunchedStep:
    """What the brain remembers of a plan until its result comes."""

    step_id: int
    sampling: list[RequestState]
    """In the order of the result's tokens."""
    work: StepWork
    deferred: list[int]
    """Places in ``sampling`` whose masks are still owed to the ranks."""


@dataclass(slots=True)
class Columns:
    """Scheduled rows in the making, column by column as ``StepPlan`` wants them."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    sampling: list[RequestState] = field(default_factory=list)

    def put(self, request: RequestState, num_tokens: int, samples: bool, new_block_ids: list[int]) -> None:
        """Schedule ``num_tokens`` of ``request`` from where it is computed."""
        self.rows.append(request.row)
        self.starts.append(request.num_computed)
        self.num_tokens.append(num_tokens)
        self.samples.append(samples)
        self.new_block_ids.append(new_block_ids)
        if samples:
            self.sampling.append(request)


class Draft:
    """A plan in the making."""

    __slots__ = (
        "_num_ample",
        "_replays_outputs",
        "_sources",
        "budget",
        "cost",
        "decodes",
        "forked",
        "forks",
        "is_starved",
        "new_rows",
        "num_promised_blocks",
        "prefill_s",
        "prefills",
        "step_id",
    )

    def __init__(
        self,
        step_id: int,
        budget: int,
        cost: CostModel,
        replays_outputs: bool = False,
        max_prefill_overhead: float = 1.0,
    ) -> None:
        self.step_id = step_id
        self._replays_outputs = replays_outputs
        self.budget = budget
        """Tokens that may still be scheduled."""
        self.cost = cost
        self._num_ample = cost.ample_prefill_tokens(max_prefill_overhead)
        self.prefill_s = math.inf
        """Time that prompts may still take."""
        self.new_rows: list[NewRow] = []
        self.decodes = Columns()
        self.prefills = Columns()
        self.num_promised_blocks = 0
        """Blocks that running requests still need for tokens they already have."""
        self.is_starved = False
        """True once a running request went without the blocks it needs."""
        self.forks: list[Fork] = []
        self.forked: list[RequestState] = []
        """The requests that fork, in the order of ``forks``."""
        self._sources: dict[tuple[int, ...], RequestState] = {}
        """Prompts whose last tokens this step computes, by how they end."""

    def put(self, request: RequestState, num_tokens: int, samples: bool, new_block_ids: list[int]) -> None:
        """Schedule ``num_tokens`` of ``request`` from where it is computed."""
        is_decode = samples and num_tokens == 1
        if self._replays_outputs:
            is_decode = request.num_computed >= request.num_prompt_tokens
        columns = self.decodes if is_decode else self.prefills
        if not is_decode and self.prefill_s < math.inf:
            self.prefill_s -= self.cost.prefill_s(num_tokens, request.num_computed)
        if not is_decode:
            self._num_ample -= num_tokens
        columns.put(request, num_tokens, samples, new_block_ids)
        self.budget -= num_tokens
        if samples:
            self._sources[_ending(request)] = request

    def limit_prefills(self, max_growth: float) -> None:
        """Let prompts take at most so many times what the decoding requests, all scheduled by now, take alone."""
        columns = self.decodes
        if columns.rows:
            step_s = self.cost.step_s(len(columns.rows), 0, sum(columns.starts))
            self.prefill_s = max(max_growth * step_s, _LEAST_PREFILL_S)

    @property
    def has_room(self) -> bool:
        """True while another prompt, or a part of one, may be scheduled.

        Of many prompts that wait, each step takes as many as it needs to be efficient, not as many as it could: the
        first ones get their tokens sooner, and those that decode wait less.
        """
        return self.budget > 0 and self.prefill_s > 0 and self._num_ample > 0

    def most_tokens(self, request: RequestState) -> int:
        """Tokens of a request that may be scheduled; of a prompt always a few, so that it gets on."""
        num_tokens = min(request.num_lag, self.budget)
        if self.prefill_s < math.inf and num_tokens > _FEWEST_TOKENS:
            in_time = self.cost.prefill_tokens(self.prefill_s, request.num_computed)
            num_tokens = min(num_tokens, max(_FEWEST_TOKENS, in_time))
        if self._replays_outputs:
            num_tokens = min(num_tokens, max(1, request.num_prompt_tokens - request.num_computed))
        return num_tokens

    def put_fork(self, source: RequestState, request: RequestState, block_ids: list[int]) -> None:
        """Let ``request`` sample from what ``source`` computes."""
        self.forks.append(Fork(request.row, source.row, block_ids))
        self.forked.append(request)

    def source_for(self, request: RequestState) -> RequestState | None:
        """A request with the same tokens, computed to their end by this step; None if there is none."""
        source = self._sources.get(_ending(request))
        if source is None or source.token_ids != request.token_ids:
            return None
        # Hashes are what a replayed trace tells prompts apart by: it has no tokens.
        given, theirs = request.request.block_hashes, source.request.block_hashes
        is_same = given == theirs or not (given and theirs)
        return source if is_same and source.request.hash_root == request.request.hash_root else None

    def finish(
        self,
        swap_out: list[BlockCopy],
        swap_in: list[BlockCopy],
        copies_awaited: int,
        late_masks: LateMasks | None = None,
        branches: list[Branch] | None = None,
        tail_copies: list[TailCopy] | None = None,
    ) -> tuple[StepPlan, LaunchedStep]:
        """The plan and what to remember of it."""
        decodes, prefills = self.decodes, self.prefills
        sampling = decodes.sampling + prefills.sampling + self.forked
        masks, deferred = masks_of(sampling)
        plan = StepPlan(
            self.step_id,
            self.new_rows,
            decodes.rows + prefills.rows,
            decodes.starts + prefills.starts,
            decodes.num_tokens + prefills.num_tokens,
            decodes.samples + prefills.samples,
            decodes.new_block_ids + prefills.new_block_ids,
            swap_out,
            swap_in,
            copies_awaited,
            masks,
            deferred,
            late_masks,
            awaits_copies=self.is_empty and late_masks is None,
            branches=branches or [],
            tail_copies=tail_copies or [],
            forks=self.forks,
        )
        return plan, LaunchedStep(self.step_id, sampling, self._work, deferred)

    @property
    def num_hidden_copies(self) -> float:
        """Blocks that may be copied beside the step, though nobody waits for them, so that nobody notices.

        Where blocks are large and steps short, it takes several steps to hide one.
        """
        if not self.cost.copy_block_s:
            return float(sys.maxsize)
        work = self._work
        step_s = self.cost.step_s(
            work.num_decodes, work.num_prefill_tokens, work.num_context_tokens, work.num_attended
        )
        return _SHARE_OF_COPIES * step_s / self.cost.copy_block_s

    @property
    def _work(self) -> StepWork:
        decodes, prefills = self.decodes, self.prefills
        return StepWork(
            len(decodes.rows),
            sum(prefills.num_tokens),
            sum(decodes.starts),
            sum(map(attended, prefills.num_tokens, prefills.starts)),
        )

    @property
    def is_empty(self) -> bool:
        """True while no row is scheduled."""
        return not self.decodes.rows and not self.prefills.rows


def _ending(request: RequestState) -> tuple[int, ...]:
    """What tells most prompts apart at little cost: their length and their last tokens."""
    return (len(request.token_ids), *request.token_ids[-8:])
