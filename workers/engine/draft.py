"""A plan in the making, and what the brain remembers of it once it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.constraint import masks_of
from workers.engine.cost_model import CostModel, StepWork
from workers.engine.plan import BlockCopy, LateMasks, NewRow, StepPlan
from workers.engine.request_state import RequestState


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
        "budget",
        "cost",
        "decodes",
        "is_starved",
        "new_rows",
        "num_promised_blocks",
        "prefills",
        "step_id",
    )

    def __init__(self, step_id: int, budget: int, cost: CostModel) -> None:
        self.step_id = step_id
        self.budget = budget
        """Tokens that may still be scheduled."""
        self.cost = cost
        self.new_rows: list[NewRow] = []
        self.decodes = Columns()
        self.prefills = Columns()
        self.num_promised_blocks = 0
        """Blocks that running requests still need for tokens they already have."""
        self.is_starved = False
        """True once a running request went without the blocks it needs."""

    def finish(
        self,
        swap_out: list[BlockCopy],
        swap_in: list[BlockCopy],
        copies_awaited: int,
        late_masks: LateMasks | None = None,
    ) -> tuple[StepPlan, LaunchedStep]:
        """The plan and what to remember of it."""
        decodes, prefills = self.decodes, self.prefills
        sampling = decodes.sampling + prefills.sampling
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
        )
        work = StepWork(
            len(decodes.rows),
            sum(prefills.num_tokens),
            sum(decodes.starts),
            sum(
                count * (start + count // 2)
                for start, count in zip(prefills.starts, prefills.num_tokens, strict=True)
            ),
        )
        return plan, LaunchedStep(self.step_id, sampling, work, deferred)

    @property
    def is_empty(self) -> bool:
        """True while no row is scheduled."""
        return not self.decodes.rows and not self.prefills.rows
