"""Measures a rank's cost model before it serves: a few steps of known sizes, timed.

Without it a new replica would be judged by a guess, and a guess that is far too kind draws requests away from
replicas that have what they need in their caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel
from workers.engine.plan import BlockCopy, Executor, NewRow, StepPlan
from workers.engine.request import ChoiceParams

_MOST_ROWS = 8
_MOST_PROMPT_TOKENS = 256
_REPEATS = 3
_MOST_COPIES = 64
_NO_GENERATION = -1
"""Of host blocks written here: no request's copy back may take them for its own."""


def measure_cost(rank: Executor, limits: EngineConfig, clock: Callable[[], float]) -> CostModel:
    """Time prefill and decode steps on an idle rank. All ranks of a group do it together.

    Leaves rows and blocks in use by nobody: a new row forgets what was there.

    Args:
        limits: what a step of this rank may hold.
        clock: seconds, monotonic.
    """
    return measure_copies(rank, limits, _Calibration(rank, limits, clock).run())


def measure_copies(rank: Executor, limits: EngineConfig, cost: CostModel) -> CostModel:
    """``cost`` with what copies between the tiers take on an idle rank; as it is where there is no host tier."""
    most = min(_MOST_COPIES, limits.num_host_blocks, limits.num_blocks)
    if not most:
        return cost
    copies = [BlockCopy(block, block, _NO_GENERATION) for block in range(most)]
    elapsed_s = []
    for step_id, num_blocks in enumerate((most, most, 1)):
        plan = StepPlan(
            step_id, [], [], [], [], [], [], swap_out=copies[:num_blocks], awaits_copies=True
        )  # fmt: skip
        rank.launch(plan)
        elapsed_s.append(rank.collect().copied_s)
    _, all_s, one_s = elapsed_s  # the first may meet memory that was never touched
    if all_s <= 0:
        return cost
    copy_block_s = max(all_s - one_s, 0.1 * all_s) / most
    return replace(cost, copy_base_s=max(0.0, one_s - copy_block_s), copy_block_s=copy_block_s)


class _Calibration:
    def __init__(self, rank: Executor, limits: EngineConfig, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._clock = clock
        self._size = limits.block_size
        # Each prompt leaves room for the tokens that the decode steps add.
        room = min(limits.max_model_len, limits.num_blocks * limits.block_size) - 2 * _REPEATS - 2
        self._prompt_len = max(1, min(_MOST_PROMPT_TOKENS, limits.max_num_batched_tokens, room))
        blocks_per_row = -(-(self._prompt_len + 2 * _REPEATS + 2) // self._size)
        self._num_rows = max(1, min(_MOST_ROWS, limits.max_num_seqs, limits.num_blocks // blocks_per_row))
        self._blocks = [
            list(range(row * blocks_per_row, (row + 1) * blocks_per_row)) for row in range(self._num_rows)
        ]
        self._lengths = [0] * self._num_rows
        self._step_ids = itertools.count()

    def run(self) -> CostModel:
        """Prefill each row by itself, then decode one row, then all of them."""
        prefill_s = min(self._prefill(row) for row in [0, *range(self._num_rows)])
        one_s = min(self._decode(1) for _ in range(_REPEATS))
        all_s = min(self._decode(self._num_rows) for _ in range(_REPEATS))
        per_sequence_s = max(0.0, all_s - one_s) / max(1, self._num_rows - 1)
        base_s = max(one_s - per_sequence_s, 0.1 * one_s)
        # A prefill step has the fixed part too, but its tokens may be as cheap as to hide in it.
        per_token_s = max(prefill_s - base_s, 0.1 * prefill_s) / self._prompt_len
        return CostModel(base_s, per_sequence_s, per_token_s)

    def _prefill(self, row: int) -> float:
        token_ids = [(7 * i + row) % 97 for i in range(self._prompt_len)]
        new_row = NewRow(row, token_ids, len(token_ids), ChoiceParams(max_tokens=1 << 20, temperature=0.0))
        self._lengths[row] = self._prompt_len
        return self._timed(
            StepPlan(
                next(self._step_ids), [new_row], [row], [0], [self._prompt_len], [True], [self._blocks[row]]
            )
        )

    def _decode(self, num_rows: int) -> float:
        rows = list(range(num_rows))
        starts = [self._lengths[row] for row in rows]
        for row in rows:
            self._lengths[row] += 1
        ones = [1] * num_rows
        return self._timed(
            StepPlan(next(self._step_ids), [], rows, starts, ones, [True] * num_rows, [[] for _ in rows])
        )

    def _timed(self, plan: StepPlan) -> float:
        started_s = self._clock()
        self._rank.launch(plan)
        self._rank.collect()
        return self._clock() - started_s
