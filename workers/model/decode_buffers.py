"""The memory of decode steps: what the host tells each, in a copy or two, and what kernels keep between launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.block_copy import copy_words
from kernels.decode_attention_work import ITEM_FIELDS, DecodeAttention, DecodeWork
from kernels.decode_prepare import DecodeColumns
from kernels.draw import DrawParams, DrawShare, draw_scratch_len
from kernels.enter_params import PARAM_FIELDS, enter_params
from kernels.filters import Filters
from kernels.shared_prefix_attention import SHARED_FIELDS, SharedWork, members_a_piece
from workers.engine.plan import Branch, NewRow
from workers.model.attention_work import TILE, cut_contexts
from workers.model.batch import Batch
from workers.model.shared_prefixes import MAX_PIECES, SharedCut, SharedPrefixes
from workers.model.step_arrays import upload

_HEADER = 16
"""int32 numbers before the columns: rows, shared pieces; then padding that keeps what follows aligned."""
MAX_LAUNCHED = 8
"""Steps whose results may be outstanding: each has its own pinned memory."""
_PROGRAMS_PER_PROCESSOR = 8
"""Programs of decode attention, of one warp each, for which reads are fastest (H200, head size 128)."""
_SHARED_PROGRAMS_PER_PROCESSOR = 2


class DecodeBuffers:
    """Device tensors of fixed place, which graphs may name, and pinned memory to fill them from."""

    def __init__(
        self,
        batch: Batch,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        share: DrawShare | None,
    ) -> None:
        """Allocate for steps of all rows of ``batch``; heads and vocabulary are those of this rank."""
        device, rows = batch.device, batch.block_tables.shape[0]
        self._batch = batch
        self._max_rows = rows
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_shares = max(processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads, 1)
        max_items, max_shared_items = rows + self._num_shares, rows // 4 + 512
        self._places = _Places(rows, self._num_shares + 1, max_items, max_shared_items)
        places = self._places
        self._told = torch.zeros(places.size, dtype=torch.int32, device=device)
        self._staging = torch.zeros(MAX_LAUNCHED, places.size, dtype=torch.int32).pin_memory()
        self._staged: NDArray[np.int32] = self._staging.numpy()
        self._results = torch.zeros(MAX_LAUNCHED, _aligned(rows), dtype=torch.int32).pin_memory()
        self._turn = 0
        self._prefixes = SharedPrefixes(
            batch.block_size, num_kv_heads, members_a_piece(num_heads // num_kv_heads)
        )
        self._cut_rows: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._cut_tiles: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._shared: SharedCut | None = None
        told = self._told
        self.columns = DecodeColumns(
            num_rows=told[:1],
            rows=told[places.rows : places.rows + rows],
            starts=told[places.starts : places.starts + rows],
            new_blocks=told[places.new_blocks : places.new_blocks + rows],
        )
        max_slots = rows * (1 + MAX_PIECES) + self._num_shares
        work = DecodeWork(
            items=told[places.items : places.shared_members].view(-1, ITEM_FIELDS),
            shares=told[places.shares : places.shares + self._num_shares + 1],
            positions=self.columns.starts,
            partial=torch.zeros(max_slots, num_heads, head_dim, dtype=torch.float32, device=device),
            lse=torch.zeros(max_slots, num_heads, dtype=torch.float32, device=device),
            counters=torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device),
        )
        shared = SharedWork(
            items=told[places.shared_items :].view(-1, SHARED_FIELDS),
            num_items=told[1:2],
            members=told[places.shared_members : places.shared_members + rows],
            first_slots=told[places.shared_slots : places.shared_slots + rows],
            num_programs=processors * _SHARED_PROGRAMS_PER_PROCESSOR,
        )
        self._attention = DecodeAttention(batch.block_tables, work, shared)
        self.params = DrawParams(
            temperatures=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
            choices=torch.zeros(rows, dtype=torch.int32, device=device),
            filters=Filters(
                min_p=torch.zeros(rows, dtype=torch.float32, device=device),
                top_k=torch.zeros(rows, dtype=torch.int32, device=device),
                top_p=torch.ones(rows, dtype=torch.float32, device=device),
            ),
        )
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.int32, device=device)
        self.share = share
        self.logits = torch.zeros(rows, vocab_size, dtype=dtype, device=device)
        self.scratch = torch.zeros(draw_scratch_len(rows, vocab_size), dtype=torch.float64, device=device)

    def attention(self, is_shared: bool) -> DecodeAttention:
        """The attention of a step with or without shared prefixes, as the device will be told of it."""
        return self._attention if is_shared else replace(self._attention, shared=None)

    def tell(
        self, rows: Sequence[int], starts: Sequence[int], new_blocks: Sequence[int], num_decodes: int
    ) -> bool:
        """Queue the copies that set up the next step; True if some of its rows share a prefix.

        Args:
            rows: places in the batch of the rows that draw.
            starts: position of the last token that each computes.
            new_blocks: the block that begins there, or -1.
            num_decodes: how many of the rows, the first, compute just that token.
        """
        staged, places, count = self._staged[self._turn], self._places, len(rows)
        staged[places.rows : places.rows + count] = rows
        staged[places.starts : places.starts + count] = starts
        staged[places.new_blocks : places.new_blocks + count] = new_blocks
        staged[0] = count
        end, is_recut = places.shares, False
        if not num_decodes:
            staged[places.shares : places.items] = 0
            self._cut_rows, end = self._cut_rows[:0], places.items
        else:
            decoding = staged[places.rows : places.rows + num_decodes]
            at = staged[places.starts : places.starts + num_decodes]
            num_tiles = at.astype(np.int64) // TILE + 1
            shared = self._prefixes.find(decoding, at, self._batch.host_block_tables)
            is_recut = not (
                shared is self._shared
                and np.array_equal(decoding, self._cut_rows)
                and np.array_equal(num_tiles, self._cut_tiles)
            )
            if is_recut:
                self._shared, self._cut_rows, self._cut_tiles = shared, decoding.copy(), num_tiles
                end = self._stage_cut(staged)
        is_shared = bool(num_decodes) and self._shared is not None
        if is_shared:
            assert self._shared is not None, "found above"
            staged[1] = len(self._shared.items)
        told, staging = self._told, self._staging[self._turn]
        told[:end].copy_(staging[:end], non_blocking=True)
        if is_shared and is_recut:
            told[places.shared_members :].copy_(staging[places.shared_members :], non_blocking=True)
        return is_shared

    def fetch(self, count: int) -> Tensor:
        """Queue the copy of the step's tokens to the host; valid once the stream has passed, for some steps."""
        result = self._results[self._turn, :count]
        copy_words(self.drawn[:count], result)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        return result

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take in the sampling parameters of new rows."""
        if not new_rows:
            return
        self._prefixes.forget()
        told = np.empty((len(new_rows), PARAM_FIELDS), dtype=np.int32)
        floats = told.view(np.float32)
        given = [new.params for new in new_rows]
        told[:, 0] = [new.row for new in new_rows]
        floats[:, 1] = [one.temperature for one in given]
        told[:, 2:4] = np.array([[_wrapped(one.seed)] for one in given], dtype=np.int64).view(np.int32)
        told[:, 4] = [one.choice_index for one in given]
        floats[:, 5] = [one.min_p for one in given]
        told[:, 6] = [one.top_k for one in given]
        floats[:, 7] = [one.top_p for one in given]
        enter_params(upload([told], self.hidden.device)[0], self.params)

    def branch(self, branches: Sequence[Branch]) -> None:
        """Take over the sampling parameters of the rows that others go on from."""
        self._prefixes.forget()
        device = self.hidden.device
        rows, sources = upload(
            [np.array([one.row for one in branches]), np.array([one.source for one in branches])], device
        )
        params, filters = self.params, self.params.filters
        for tensor in (
            params.temperatures,
            params.seeds,
            params.choices,
            filters.min_p,
            filters.top_k,
            filters.top_p,
        ):
            tensor[rows] = tensor[sources]

    def _stage_cut(self, staged: NDArray[np.int32]) -> int:
        """Write pieces into pinned memory; return where those of the rows' own contexts end."""
        places, shared = self._places, self._shared
        pieces = shared.pieces if shared is not None else None
        cut = cut_contexts(self._cut_rows, self._cut_tiles, self._num_shares, shared=pieces)
        end = places.items + cut.items.size
        staged[places.shares : places.shares + len(cut.shares)] = cut.shares
        staged[places.items : end] = cut.items.reshape(-1)
        if shared is not None:
            staged[places.shared_members : places.shared_members + len(shared.members)] = shared.members
            slots = cut.first_shared_slots
            staged[places.shared_slots : places.shared_slots + len(slots)] = slots
            staged[places.shared_items : places.shared_items + shared.items.size] = shared.items.reshape(-1)
        return end


class _Places:
    """Where each part of what the host tells begins, in int32 numbers; all at multiples of 16."""

    def __init__(self, max_rows: int, num_shares: int, max_items: int, max_shared_items: int) -> None:
        rows = _aligned(max_rows)
        self.rows = _HEADER
        self.starts = self.rows + rows
        self.new_blocks = self.starts + rows
        self.shares = self.new_blocks + rows
        self.items = self.shares + _aligned(num_shares)
        self.shared_members = self.items + _aligned(max_items * ITEM_FIELDS)
        self.shared_slots = self.shared_members + rows
        self.shared_items = self.shared_slots + rows
        self.size = self.shared_items + _aligned(max_shared_items * SHARED_FIELDS)


def _aligned(count: int) -> int:
    return -(-count // 16) * 16


def _wrapped(seed: int) -> int:
    """Modulo 2^64, as two's complement."""
    return ((seed + 2**63) % 2**64) - 2**63
