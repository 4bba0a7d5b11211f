"""The rows of a rank: for each place in the batch its tokens and block table, changed by each plan's deltas.

Both live on the device. The rank itself writes sampled tokens, so a row's newest token need not be known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.decode_attention_work import DecodeAttention
from kernels.prefill_attention_hopper import QueryTiles
from workers.engine.plan import Branch, NewRow, StepPlan
from workers.model.prefill_work import TILE_FIELDS, cut_queries
from workers.model.step_inputs import StepInputs


class Batch:
    """Token ids and block tables of all rows."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        """Allocate for ``max_num_seqs`` rows of ``max_model_len`` tokens."""
        self.block_size = block_size
        self.device = device
        max_num_blocks = -(-max_model_len // block_size)
        # One column more than tokens can be: the last token sampled is stored, too.
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_num_blocks, dtype=torch.int32, device=device)
        self.host_block_tables: NDArray[np.int32] = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        """The tables as the host knows them: where prefixes are shared is found here."""
        self._num_blocks = [0] * max_num_seqs

    def branch(self, branches: Sequence[Branch]) -> None:
        """Let rows go on from others as all of these were before, each with a token of its own."""
        rows, sources, ends, token_ids = self._to_device(
            [[one.row, one.source, one.num_tokens, one.token_id] for one in branches]
        ).T
        self.token_ids[rows] = self.token_ids[sources]
        self.token_ids[rows, ends] = token_ids.to(torch.int32)
        self.block_tables[rows] = self.block_tables[sources]
        self.host_block_tables[[one.row for one in branches]] = self.host_block_tables[
            [one.source for one in branches]
        ]
        for one in branches:
            self._num_blocks[one.row] = one.num_blocks

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's new rows and new blocks."""
        for new in plan.new_rows:
            self._enter(new)
        places: list[tuple[int, int, int]] = []
        tables = [*zip(plan.rows, plan.new_block_ids, strict=True)]
        tables += [(fork.row, fork.block_ids) for fork in plan.forks]
        for row, block_ids in tables:
            first = self._num_blocks[row]
            places.extend((row, first + index, block_id) for index, block_id in enumerate(block_ids))
            self._num_blocks[row] = first + len(block_ids)
            if block_ids:
                self.host_block_tables[row, first : first + len(block_ids)] = block_ids
        if places:
            rows, columns, block_ids_ = self._to_device(list(zip(*places, strict=True)))
            self.block_tables[rows, columns] = block_ids_.to(torch.int32)

    def grow(self, plan: StepPlan) -> list[int] | None:
        """Take in new blocks without telling the device; return each row's, -1 where it has none.

        None, and nothing has changed, if a row has more than the one block that its token begins, or if rows are new.
        """
        if plan.new_rows:
            return None
        new_blocks = [-1] * len(plan.rows)
        grown: list[int] = []
        for index, ids in enumerate(plan.new_block_ids):
            if ids:
                if (
                    len(ids) > 1
                    or plan.starts[index] // self.block_size != self._num_blocks[plan.rows[index]]
                ):
                    return None
                new_blocks[index] = ids[0]
                grown.append(index)
        for index in grown:
            row = plan.rows[index]
            self.host_block_tables[row, self._num_blocks[row]] = new_blocks[index]
            self._num_blocks[row] += 1
        return new_blocks

    def lone_inputs(self, plan: StepPlan) -> StepInputs:
        """Return the step's tensors with each token as a row that decodes: what it attends to is computed by itself."""
        inputs = self.inputs(plan)
        counts = torch.from_numpy(np.array(plan.num_tokens))
        rows = torch.from_numpy(np.array(plan.rows)).repeat_interleave(counts)
        context_lens = (inputs.positions + 1).to(torch.int32)
        longest = int(context_lens.max())
        return replace(
            inputs,
            num_decodes=len(rows),
            decode_block_tables=self._tables(rows, longest),
            decode_context_lens=context_lens,
            max_decode_context_len=longest,
        )

    def inputs(
        self,
        plan: StepPlan,
        min_num_tokens: int = 1,
        decode_work: DecodeAttention | None = None,
        num_decodes: int | None = None,
        has_tiles: bool = False,
    ) -> StepInputs:
        """Return the step's tensors, padded with tokens that are computed and thrown away to ``min_num_tokens``.

        Args:
            plan: what to compute.
            min_num_tokens: at least so many.
            decode_work: how the attention of decoding rows is cut; tables and lengths say it otherwise.
            num_decodes: rows, the first, that decode; None: those before the first of more than one token.
            has_tiles: cut the queries of prompts into tiles without ``decode_work`` too.
        """
        num_rows = len(plan.rows)
        if num_decodes is None:
            num_decodes = next((i for i, count in enumerate(plan.num_tokens) if count > 1), num_rows)
        context_lens = [start + count for start, count in zip(plan.starts, plan.num_tokens, strict=True)]
        token_starts = [0, *accumulate(plan.num_tokens)]
        sample_tokens = [token_starts[i + 1] - 1 for i in range(num_rows) if plan.samples[i]]
        sample_tokens += [token_starts[plan.rows.index(fork.source) + 1] - 1 for fork in plan.forks]
        num_tokens = token_starts[-1]
        counts = np.array(plan.num_tokens)
        base = num_decodes if decode_work is None else 0
        query_starts = np.array(token_starts[num_decodes:]) - base
        tiles = np.empty((0, TILE_FIELDS), dtype=np.int64)
        if decode_work is not None or has_tiles:
            tiles = cut_queries(query_starts, np.array(context_lens[num_decodes:], dtype=np.int64))
        columns = [
            # First, and so at an aligned address: a kernel has another variant for others.
            np.arange(num_tokens) + np.repeat(np.array(plan.starts) - token_starts[:-1], counts),
            np.repeat(plan.rows, counts),
            np.array(plan.rows),
            np.array(context_lens),
            query_starts,
            np.array(sample_tokens, dtype=np.int64),
            np.array([len(tiles)]),
            tiles.reshape(-1),
        ]
        # One copy for all of them.
        packed = self._to_device([np.concatenate(columns)])[0]
        positions_, rows_of_tokens, rows, lens, starts, sample_tokens_, num_tiles, tiles_ = packed.split(
            [len(column) for column in columns]
        )
        lens = lens.to(torch.int32)
        prefill_tiles = None
        if len(tiles):
            prefill_tiles = QueryTiles(
                tiles_.to(torch.int32).view(-1, TILE_FIELDS), num_tiles.to(torch.int32)
            )
        blocks = self.block_tables[rows_of_tokens, positions_ // self.block_size].long()
        token_ids = self.token_ids[rows_of_tokens, positions_].long()
        if num_tokens < min_num_tokens:
            token_ids = torch.nn.functional.pad(token_ids, (0, min_num_tokens - num_tokens))
        max_decode = max(context_lens[:num_decodes], default=0)
        max_prefill = max(context_lens[num_decodes:], default=0)
        return StepInputs(
            token_ids=token_ids,
            positions=positions_,
            slots=blocks * self.block_size + positions_ % self.block_size,
            num_decodes=num_decodes,
            decode_block_tables=self._tables(rows[:num_decodes], max_decode),
            decode_context_lens=lens[:num_decodes],
            max_decode_context_len=max_decode,
            prefill_block_tables=self._tables(rows[num_decodes:], max_prefill),
            prefill_query_starts=starts.to(torch.int32),
            prefill_context_lens=lens[num_decodes:],
            sample_tokens=sample_tokens_,
            decode_work=decode_work,
            prefill_tiles=prefill_tiles,
        )

    def store(self, rows: list[int], positions: list[int], token_ids: Tensor) -> None:
        """Write a sampled token at its position in each row; 0 for ``NO_TOKEN``, since a launched step may read it."""
        rows_, positions_ = self._to_device([rows, positions])
        self.token_ids[rows_, positions_] = token_ids.to(torch.int32).clamp_(min=0)

    def _enter(self, new: NewRow) -> None:
        (token_ids,) = self._to_device([new.token_ids])
        self.token_ids[new.row, : len(new.token_ids)] = token_ids.to(torch.int32)
        self._num_blocks[new.row] = 0

    def _tables(self, rows: Tensor, max_context_len: int) -> Tensor:
        return self.block_tables[rows, : -(-max_context_len // self.block_size)]

    def _to_device(
        self, columns: list[list[int]] | list[tuple[int, ...]] | list[NDArray[np.int64]]
    ) -> Tensor:
        """Return [columns, length] int64; from pinned memory where the device is not the host, so nothing waits."""
        tensor = torch.from_numpy(np.array(columns, dtype=np.int64))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
