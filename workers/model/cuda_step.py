"""A step launched on CUDA, and what becomes of it once it has run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.plan import StepPlan, StepResult, TokenLogprobs
from workers.model.block_copies import CopyReport
from workers.model.deferred_rows import DeferredRows
from workers.model.pooler import PooledRows
from workers.model.prompt_scorer import ScoredPrompts
from workers.model.row_sampler import SampledLogprobs


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose results are on their way to the host."""

    plan: StepPlan
    started: torch.cuda.Event
    done: torch.cuda.Event
    token_ids: Tensor
    logprobs: SampledLogprobs | None
    logprob_places: list[int]
    """Which of the sampled rows ``logprobs`` speaks of."""
    pooled: PooledRows | None = None
    deferred: DeferredRows | None = None
    scored: ScoredPrompts | None = None

    def result(self, copies: CopyReport) -> StepResult:
        """What the brain is told; ``done`` has passed. ``copies`` are those that ended meanwhile."""
        token_ids: list[int] = self.token_ids.tolist()
        found = [(self.logprob_places, self.logprobs)]
        if self.deferred is not None:
            late = self.deferred
            assert late.token_ids is not None, "collect follows the masks that the step waits for"
            for place, token_id in zip(late.places, late.token_ids.tolist(), strict=True):
                token_ids[place] = token_id
            found.append((late.places, late.logprobs))
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for places, some in found:
            for place, one in zip(places, some.by_row() if some is not None else [], strict=some is not None):
                logprobs[place] = one
        told = logprobs if any(some is not None for _, some in found) else None
        elapsed_s = self.started.elapsed_time(self.done) / 1e3
        pooled = self.pooled.by_row(len(self.token_ids)) if self.pooled is not None else None
        scored = self.scored.by_row(len(self.token_ids)) if self.scored is not None else None
        return StepResult(
            self.plan.step_id,
            token_ids,
            told,
            elapsed_s,
            pooled,
            scored,
            copies.copied,
            copies.num_blocks,
            copies.elapsed_s,
            copies.corrupt_blocks,
        )
