"""What a launched step tells the brain, from tensors that need no GPU."""

from __future__ import annotations

import torch

from workers.engine.plan import StepPlan, TokenLogprobs
from workers.model.block_copies import CopyReport
from workers.model.cuda_step import DeferredRows, LaunchedStep
from workers.model.row_sampler import SampledLogprobs


class Clock:
    """Takes an event's place."""

    def elapsed_time(self, end: Clock) -> float:
        return 4.0


def make_logprobs(value: float) -> SampledLogprobs:
    return SampledLogprobs(
        [1], torch.tensor([value]), torch.tensor([[7]]), torch.tensor([[value]]), torch.tensor([1])
    )


def test_rows_that_waited_for_masks_stand_among_the_others() -> None:
    plan = StepPlan(3, [], [0, 1, 2], [5] * 3, [1] * 3, [True] * 3, [[]] * 3, deferred=[1])
    late = DeferredRows([1], [], torch.zeros(1, 9), True, torch.tensor([8]), make_logprobs(-2.0))
    step = LaunchedStep(
        plan, Clock(), Clock(), torch.tensor([4, 0, 6]), make_logprobs(-1.0), [2], deferred=late
    )

    result = step.result(CopyReport(copied=2, num_blocks=5))

    assert (result.step_id, result.token_ids, result.elapsed_s) == (3, [4, 8, 6], 0.004)
    assert result.logprobs == [None, TokenLogprobs(-2.0, [7], [-2.0], 1), TokenLogprobs(-1.0, [7], [-1.0], 1)]
    assert (result.copied, result.num_copied_blocks, result.pooled) == (2, 5, None)
