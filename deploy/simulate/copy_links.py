"""Copies between the tiers in virtual time: two links, one each way, beside the steps.

A plan's copies of one way follow those of earlier plans on the same link, and begin no sooner than the plan's step.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.cost_model import CostModel
from workers.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies of one plan, one way."""

    step_id: int
    num_blocks: int
    copy_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class Copied:
    """What a step's result says of copies: see ``StepResult``."""

    copied: int
    num_blocks: int
    copied_s: float


class CopyLinks:
    """What is on its way, and until when."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._free_s = [0.0, 0.0]
        self._batches: list[_Batch] = []

    @property
    def done_s(self) -> float:
        """When all copies will be done."""
        return max((batch.due_s for batch in self._batches), default=0.0)

    def begin(self, plan: StepPlan, start_s: float) -> None:
        """Take up a plan's copies."""
        for way, copies in enumerate((plan.swap_out, plan.swap_in)):
            if copies:
                copy_s = self._cost.copy_s(len(copies))
                self._free_s[way] = max(start_s, self._free_s[way]) + copy_s
                self._batches.append(_Batch(plan.step_id, len(copies), copy_s, self._free_s[way]))

    def end(self, step_id: int, now_s: float) -> Copied:
        """Let go of what is done as the step's result comes, at ``now_s``."""
        done = [batch for batch in self._batches if batch.due_s <= now_s]
        self._batches = [batch for batch in self._batches if batch.due_s > now_s]
        return Copied(
            min([step_id, *(batch.step_id - 1 for batch in self._batches)]),
            sum(batch.num_blocks for batch in done),
            sum(batch.copy_s for batch in done),
        )
