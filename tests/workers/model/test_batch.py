"""A batch says of a step, in one copy, what its plans have told it."""

from __future__ import annotations

import random

import numpy as np
import torch

from workers.engine.plan import Fork, NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.batch import Batch
from workers.model.step_arrays import StepArrays

NUM_ROWS, MAX_LEN, BLOCK_SIZE = 6, 200, 16


class Told:
    """What a batch ought to know, token by token."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.tokens[new.row], self.tables[new.row] = [*new.token_ids], []
        for row, block_ids in zip(plan.rows, plan.new_block_ids, strict=True):
            self.tables[row] = self.tables[row] + block_ids


def random_plans(rng: random.Random) -> list[StepPlan]:
    """Prompts in chunks, those that decode first; blocks at random places."""
    params, plans, done = ChoiceParams(max_tokens=9), [], {}
    lengths: dict[int, int] = {}
    free = rng.sample(range(1000), 400)
    for step in range(12):
        new_rows = []
        for row in rng.sample(range(NUM_ROWS), rng.randrange(3)):
            lengths[row], done[row] = rng.randrange(1, MAX_LEN - 20), 0
            ids = [rng.randrange(500) for _ in range(lengths[row])]
            new_rows.append(NewRow(row, ids, lengths[row], params))
        begun = [row for row in lengths if rng.random() < 0.8 and done[row] < MAX_LEN - 1]
        counts = {row: max(1, min(rng.randrange(1, 90), lengths[row] - done[row])) for row in begun}
        ordered = sorted(begun, key=lambda row: counts[row] > 1)
        starts = [done[row] for row in ordered]
        blocks = []
        for row in ordered:
            end = done[row] + counts[row]
            blocks.append([free.pop() for _ in range(-(-end // BLOCK_SIZE) - -(-done[row] // BLOCK_SIZE))])
            done[row] = end
        if ordered:
            samples = [done[row] >= lengths[row] for row in ordered]
            plans.append(
                StepPlan(step, new_rows, ordered, starts, [counts[r] for r in ordered], samples, blocks)
            )
        else:
            for new in new_rows:
                del lengths[new.row]
    return plans


def test_a_step_is_told_as_its_plans_say() -> None:
    num_known = 0
    for seed in range(40):
        batch, told = Batch(NUM_ROWS, MAX_LEN, BLOCK_SIZE, torch.device("cpu")), Told()
        for plan in random_plans(random.Random(seed)):
            batch.apply(plan)
            told.apply(plan)

            inputs = batch.inputs(plan, min_num_tokens=8)

            num_decodes = next((i for i, n in enumerate(plan.num_tokens) if n > 1), len(plan.rows))
            scheduled = [*zip(plan.rows, plan.starts, plan.num_tokens, strict=True)]
            places = [(row, start + i) for row, start, count in scheduled for i in range(count)]
            # Those beyond the prompt are sampled, and stored by the rank.
            known = [
                (i, told.tokens[row][at]) for i, (row, at) in enumerate(places) if at < len(told.tokens[row])
            ]
            num_known += len(known)
            assert all(inputs.token_ids[i] == token for i, token in known)
            assert len(inputs.token_ids) == max(8, len(places))
            assert inputs.positions.tolist() == [at for _, at in places]
            assert inputs.slots.tolist() == [
                told.tables[row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in places
            ]
            assert inputs.num_decodes == num_decodes
            lens = [start + count for _, start, count in scheduled]
            assert inputs.decode_context_lens.tolist() == lens[:num_decodes]
            assert inputs.prefill_context_lens.tolist() == lens[num_decodes:]
            ends = np.cumsum(plan.num_tokens)
            assert inputs.prefill_query_starts.tolist() == [0, *(ends[num_decodes:] - num_decodes)]
            samples = [end - 1 for end, is_last in zip(ends, plan.samples, strict=True) if is_last]
            assert inputs.sample_tokens.tolist() == samples
            tables = [*inputs.decode_block_tables.tolist(), *inputs.prefill_block_tables.tolist()]
            for (row, start, count), table in zip(scheduled, tables, strict=True):
                num_blocks = -(-(start + count) // BLOCK_SIZE)
                assert table[:num_blocks] == told.tables[row][:num_blocks]
            assert batch.block_tables.tolist() == batch.host_block_tables.tolist()
    assert num_known > 10_000


def test_forks_sample_where_their_source_does_and_tiles_cover_all_queries() -> None:
    batch = Batch(NUM_ROWS, MAX_LEN, BLOCK_SIZE, torch.device("cpu"))
    params = ChoiceParams(max_tokens=9)
    new_rows = [NewRow(0, [1, 2, 3], 3, params), NewRow(2, [5] * 180, 180, params), NewRow(4, [9], 1, params)]
    blocks = [[7], [3], [*range(20, 32)]]
    forks = [Fork(5, 2, [*range(20, 32)])]
    plan = StepPlan(0, new_rows, [4, 0, 2], [0, 0, 0], [1, 3, 180], [True, True, True], blocks, forks=forks)
    batch.apply(plan)

    arrays: StepArrays = batch.arrays(plan, None, has_work=True, has_tiles=True)

    assert arrays.num_decodes == 1
    assert arrays.num_prefills == 2
    assert arrays.sample_tokens.tolist() == [0, 3, 183, 183]
    assert arrays.query_starts.tolist() == [1, 4, 184]
    assert sorted(arrays.tiles.tolist()) == [[0, 1, 3, 0], [1, 4, 128, 0], [1, 132, 52, 128]]
    assert arrays.num_prefill_blocks == 12
    assert batch.block_tables[5, :12].tolist() == batch.host_block_tables[5, :12].tolist() == blocks[2]
