"""The cost model that is measured at start is the rank's own."""

from __future__ import annotations

import pytest

from workers.calibration import measure_cost
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.plan import StepPlan
from workers.scripted_rank import ScriptedRank


class TimedRank(ScriptedRank):
    """Takes as long, on a clock of its own, as a given cost model says."""

    def __init__(self, cost: CostModel, limits: EngineConfig) -> None:
        super().__init__(limits, vocab_size=97)
        self._cost = cost
        self.now_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        num_decodes = sum(count == 1 for count in plan.num_tokens)
        self.now_s += self._cost.step_s(num_decodes, plan.num_batched_tokens - num_decodes)
        super().launch(plan)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_model_len", "max_num_batched_tokens"),
    [(1000, 64, 8192, 1024), (40, 2, 300, 64), (9, 64, 100, 1024)],
)
def test_the_measured_cost_is_the_ranks_own(
    num_blocks: int, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
) -> None:
    limits = EngineConfig(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    cost = CostModel(base_s=0.02, per_sequence_s=0.002, per_token_s=0.001)
    rank = TimedRank(cost, limits)

    measured = measure_cost(rank, limits, lambda: rank.now_s)

    assert measured.per_token_s == pytest.approx(cost.per_token_s, rel=0.05)
    assert measured.step_s(1) == pytest.approx(cost.step_s(1), rel=0.01)
    if max_num_seqs > 1 and num_blocks > 20:
        assert measured.per_sequence_s == pytest.approx(cost.per_sequence_s, rel=0.01)


def test_the_smallest_pool_is_measured_too() -> None:
    limits = EngineConfig(
        num_blocks=1, block_size=16, max_num_seqs=1, max_model_len=16, max_num_batched_tokens=16
    )
    rank = TimedRank(CostModel(), limits)

    assert measure_cost(rank, limits, lambda: rank.now_s).base_s > 0
