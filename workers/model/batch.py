"""The rows of a rank: for each place in the batch its tokens and block table, changed by each plan's deltas.

Both live on the device. The rank itself writes sampled tokens, so a row's newest token need not be known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.chunk_attention import ChunkWork
from kernels.decode_attention_work import DecodeAttention
from kernels.prefill_attention_hopper import QueryTiles
from workers.engine.plan import Branch, NewRow, StepPlan
from workers.model.chunk_work import ChunkCut
from workers.model.prefill_work import TILE_FIELDS, cut_queries
from workers.model.step_arrays import StepArrays, upload
from workers.model.step_inputs import StepInputs

_FEW_TABLES = 3
"""A copy each takes no longer than one of all and what spreads it."""


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
        tables = [(row, ids) for row, ids in zip(plan.rows, plan.new_block_ids, strict=True) if ids]
        tables += [(fork.row, fork.block_ids) for fork in plan.forks if fork.block_ids]
        places: list[tuple[int, int, int]] = []
        for row, block_ids in tables:
            first = self._num_blocks[row]
            end = self._num_blocks[row] = first + len(block_ids)
            self.host_block_tables[row, first:end] = block_ids
            if len(tables) <= _FEW_TABLES:
                self._put(self.block_tables[row, first:end], block_ids)
            else:
                places.extend((row, first + index, block_id) for index, block_id in enumerate(block_ids))
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
            decode_block_tables=self._tables(rows, -(-longest // self.block_size)),
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
            num_decodes: see ``arrays``.
            has_tiles: cut the queries of prompts into tiles without ``decode_work`` too.
        """
        has_work = decode_work is not None
        arrays = self.arrays(plan, num_decodes, has_work, has_work or has_tiles)
        return self.upload(arrays, min_num_tokens, decode_work)

    def arrays(
        self,
        plan: StepPlan,
        num_decodes: int | None,
        has_work: bool,
        has_tiles: bool,
        chunk_cut: ChunkCut | None = None,
    ) -> StepArrays:
        """Return the step in numbers.

        Args:
            plan: what to compute.
            num_decodes: rows, the first, that decode; None: those before the first of more than one token.
            has_work: queries are counted from the step's first token, as ``StepInputs.decode_work`` wants them.
            has_tiles: cut the queries of prompts into tiles.
            chunk_cut: how to cut few new tokens and their contexts into pieces, where it pays; None: not at all.
        """
        if num_decodes is None:
            num_decodes = next((i for i, count in enumerate(plan.num_tokens) if count > 1), len(plan.rows))
        rows, starts, counts = (np.array(one) for one in (plan.rows, plan.starts, plan.num_tokens))
        context_lens = starts + counts
        token_starts = np.concatenate([[0], np.cumsum(counts)])
        ends = token_starts[1:] - 1
        samples = np.array([*plan.samples], dtype=bool)
        forks = [plan.rows.index(fork.source) for fork in plan.forks]
        sample_tokens = np.concatenate([ends[samples], ends[forks] if forks else ends[:0]])
        query_starts = token_starts[num_decodes:] - (0 if has_work else num_decodes)
        tiles = np.empty((0, TILE_FIELDS), dtype=np.int64)
        if has_tiles:
            tiles = cut_queries(query_starts, context_lens[num_decodes:])
        chunks = None
        if (
            chunk_cut is not None
            and num_decodes < len(rows)
            and chunk_cut.pays(query_starts, context_lens[num_decodes:])
        ):
            chunks = chunk_cut.cut(query_starts, context_lens[num_decodes:], int(token_starts[-1]))
        positions = np.arange(token_starts[-1]) + np.repeat(starts - token_starts[:-1], counts)
        rows_of_tokens = np.repeat(rows, counts)
        blocks = self.host_block_tables[rows_of_tokens, positions // self.block_size]
        longest = int(context_lens[num_decodes:].max(initial=0))
        return StepArrays(
            num_decodes=num_decodes,
            token_places=rows_of_tokens * self.token_ids.shape[1] + positions,
            positions=positions,
            slots=blocks.astype(np.int64) * self.block_size + positions % self.block_size,
            rows=rows,
            context_lens=context_lens.astype(np.int32),
            query_starts=query_starts.astype(np.int32),
            sample_tokens=sample_tokens,
            tiles=tiles.astype(np.int32),
            num_prefill_blocks=-(-longest // self.block_size),
            chunks=chunks,
        )

    def upload(
        self, arrays: StepArrays, min_num_tokens: int = 1, decode_work: DecodeAttention | None = None
    ) -> StepInputs:
        """Return ``arrays`` as tensors; see ``inputs``."""
        num_decodes, num_tiles = arrays.num_decodes, np.array([len(arrays.tiles)], dtype=np.int32)
        chunks = arrays.chunks
        # Those of eight bytes first: what follows stays aligned.
        positions, slots, places, rows, sample_tokens, lens, starts, tiles, num_tiles_, *cut = upload(
            [
                arrays.positions,
                arrays.slots,
                arrays.token_places,
                arrays.rows,
                arrays.sample_tokens,
                arrays.context_lens,
                arrays.query_starts,
                arrays.tiles,
                num_tiles,
                *((chunks.tiles, chunks.items, chunks.shares, chunks.merges) if chunks is not None else ()),
            ],
            self.device,
        )
        token_ids = self.tokens_at(places)
        if len(token_ids) < min_num_tokens:
            token_ids = torch.nn.functional.pad(token_ids, (0, min_num_tokens - len(token_ids)))
        max_decode = int(arrays.context_lens[:num_decodes].max(initial=0))
        # Where work is cut, decoding rows read the batch's tables.
        decoding = rows[: num_decodes if decode_work is None else 0]
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            num_decodes=num_decodes,
            decode_block_tables=self._tables(decoding, -(-max_decode // self.block_size)),
            decode_context_lens=lens[:num_decodes],
            max_decode_context_len=max_decode,
            prefill_block_tables=self._tables(rows[num_decodes:], arrays.num_prefill_blocks),
            prefill_query_starts=starts,
            prefill_context_lens=lens[num_decodes:],
            sample_tokens=sample_tokens,
            decode_work=decode_work,
            prefill_tiles=QueryTiles(tiles, num_tiles_) if len(tiles) else None,
            prefill_chunks=ChunkWork(*cut) if cut else None,
        )

    def tokens_at(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tokens at ``StepArrays.token_places``, int32."""
        return torch.index_select(self.token_ids.view(-1), 0, places, out=out)

    def store(self, rows: list[int], positions: list[int], token_ids: Tensor) -> None:
        """Write a sampled token at its position in each row; 0 for ``NO_TOKEN``, since a launched step may read it."""
        rows_, positions_ = self._to_device([rows, positions])
        self.token_ids[rows_, positions_] = token_ids.to(torch.int32).clamp_(min=0)

    def _enter(self, new: NewRow) -> None:
        self._put(self.token_ids[new.row, : len(new.token_ids)], new.token_ids)
        self._num_blocks[new.row] = 0

    def _put(self, target: Tensor, values: Sequence[int]) -> None:
        """Write to a part of a row in a single copy."""
        source = torch.from_numpy(np.array(values, dtype=np.int32))
        target.copy_(source if self.device.type == "cpu" else source.pin_memory(), non_blocking=True)

    def _tables(self, rows: Tensor, num_blocks: int) -> Tensor:
        return self.block_tables[rows, :num_blocks]

    def _to_device(self, columns: list[list[int]] | list[tuple[int, ...]]) -> Tensor:
        """Return [columns, length] int64 on the device."""
        return upload([np.array(columns, dtype=np.int64)], self.device)[0]
