"""The memory of decode steps: what the host tells each step, in one copy, and what kernels keep between launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.decode_attention_work import ITEM_FIELDS, DecodeWork
from kernels.decode_prepare import DecodeColumns
from kernels.draw import DrawParams, draw_scratch_len
from workers.engine.plan import NewRow
from workers.engine.request import ChoiceParams
from workers.model.attention_work import TILE, cut_contexts

_HEADER = 16
"""int32 numbers before the columns: the number of rows, then padding that keeps what follows aligned."""
MAX_LAUNCHED = 8
"""Steps whose results may be outstanding: each has its own pinned memory."""
_PROGRAMS_PER_PROCESSOR = 3
"""Programs of decode attention that one multiprocessor's shared memory holds (H200, head size 128)."""


class DecodeBuffers:
    """Device tensors of fixed place, which graphs may name, and pinned memory to fill them from."""

    def __init__(
        self,
        max_num_seqs: int,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for steps of up to ``max_num_seqs`` rows; heads are those of this rank."""
        self._max_rows = max_num_seqs
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_shares = max(processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads, 1)
        self._max_items = max_num_seqs + self._num_shares
        self._shares_start = _HEADER + 3 * max_num_seqs
        self._items_start = self._shares_start + -(-(self._num_shares + 1) // 16) * 16
        size = self._items_start + self._max_items * ITEM_FIELDS
        self._told = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = torch.zeros(MAX_LAUNCHED, size, dtype=torch.int32).pin_memory()
        self._staged: NDArray[np.int32] = self._staging.numpy()
        self._results = torch.zeros(MAX_LAUNCHED, max_num_seqs, dtype=torch.int32).pin_memory()
        self._turn = 0
        self._cut_rows: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._cut_tiles: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        first, rows = _HEADER, max_num_seqs
        self.columns = DecodeColumns(
            num_rows=self._told[:1],
            rows=self._told[first : first + rows],
            starts=self._told[first + rows : first + 2 * rows],
            new_blocks=self._told[first + 2 * rows : first + 3 * rows],
        )
        self.work = DecodeWork(
            items=self._told[self._items_start :].view(-1, ITEM_FIELDS),
            shares=self._told[self._shares_start : self._shares_start + self._num_shares + 1],
            positions=self.columns.starts,
            partial=torch.zeros(self._max_items, num_heads, head_dim, dtype=torch.float32, device=device),
            lse=torch.zeros(self._max_items, num_heads, dtype=torch.float32, device=device),
            counters=torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device),
        )
        self.params = DrawParams(
            temperatures=torch.zeros(max_num_seqs, dtype=torch.float32, device=device),
            seeds=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
            choices=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
        )
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.slots = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(max_num_seqs, hidden_size, dtype=dtype, device=device)
        self.drawn = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.scratch = torch.zeros(draw_scratch_len(max_num_seqs, vocab_size), device=device)

    def tell(self, rows: Sequence[int], starts: Sequence[int], new_blocks: Sequence[int]) -> None:
        """Queue one copy that sets up the next step; ``new_blocks`` has -1 where a row gets none."""
        staged = self._staged[self._turn]
        count, first = len(rows), _HEADER
        staged[first : first + count] = rows
        staged[first + self._max_rows : first + self._max_rows + count] = starts
        staged[first + 2 * self._max_rows : first + 2 * self._max_rows + count] = new_blocks
        end = self._shares_start
        row_column = staged[first : first + count]
        num_tiles = (
            staged[first + self._max_rows : first + self._max_rows + count].astype(np.int64) // TILE + 1
        )
        if not (np.array_equal(row_column, self._cut_rows) and np.array_equal(num_tiles, self._cut_tiles)):
            cut = cut_contexts(row_column, num_tiles, self._num_shares)
            self._cut_rows, self._cut_tiles = row_column.copy(), num_tiles
            end = self._items_start + cut.items.size
            staged[self._shares_start : self._shares_start + self._num_shares + 1] = cut.shares
            staged[self._items_start : end] = cut.items.reshape(-1)
        staged[0] = count
        self._told[:end].copy_(self._staging[self._turn, :end], non_blocking=True)

    def fetch(self, count: int) -> Tensor:
        """Queue the copy of the step's tokens to the host; valid once the stream has passed, for some steps."""
        result = self._results[self._turn, :count]
        result.copy_(self.drawn[:count], non_blocking=True)
        self._turn = (self._turn + 1) % MAX_LAUNCHED
        return result

    def enter(self, new_rows: Sequence[NewRow]) -> None:
        """Take in the sampling parameters of new rows."""
        if not new_rows:
            return
        rows = _upload([new.row for new in new_rows], torch.int64, self.hidden.device)
        params = [new.params for new in new_rows]
        for tensor, values in (
            (self.params.temperatures, [one.temperature for one in params]),
            (self.params.seeds, [_wrapped(one.seed) for one in params]),
            (self.params.choices, [one.choice_index for one in params]),
        ):
            tensor[rows] = _upload(values, tensor.dtype, tensor.device)


def is_plain(params: ChoiceParams) -> bool:
    """True if ``kernels.draw`` alone samples it: no filter, penalty, bias, forbidden token or log-probability."""
    return (
        params.top_k <= 0
        and params.top_p >= 1
        and params.min_p <= 0
        and not params.has_penalties
        and not params.logit_bias
        and params.num_logprobs is None
        and params.min_tokens == 0
    )


def _wrapped(seed: int) -> int:
    """Modulo 2^64, as two's complement."""
    return ((seed + 2**63) % 2**64) - 2**63


def _upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
