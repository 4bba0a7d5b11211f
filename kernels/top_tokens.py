"""The highest logits of each row and where they stand, of equal ones those with the lowest ids.

``torch.topk`` on CUDA takes one of several ways by how many rows there are, and with it other ones of equal logits:
those are common where logits were rounded to 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import tl, triton

_BLOCK = 8192
_NONE = tl.constexpr(2147483647)
"""No column."""


def top_tokens_ref(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Say in plain torch what ``top_tokens`` must return."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` highest of each row [num_rows, count], descending, and their columns, int64.

    On CUDA the time grows with ``count``: each is a walk over the row. Elsewhere any of equal logits may be returned.

    Args:
        logits: [num_rows, width] float32, rows contiguous, without NaN.
        count: 0 to width.

    Raises:
        ValueError: ``count`` is more than there are, or ``logits`` are of another type or layout.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}: rows of float32 are needed")
    if not 0 <= count <= logits.shape[1]:
        raise ValueError(f"{count} of {logits.shape[1]} logits")
    if logits.device.type == "cuda":
        return _launch(logits, count)
    top = logits.topk(count, dim=-1)
    return top.values, top.indices


def _launch(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values = logits.new_empty(logits.shape[0], count)
    ids = torch.empty_like(values, dtype=torch.int64)
    if values.numel():
        _top_tokens_kernel[(logits.shape[0],)](
            logits, values, ids, logits.stride(0), logits.shape[1], count, BLOCK=_BLOCK, num_warps=16
        )
    return values, ids


@triton.jit(do_not_specialize=["logits_ptr", "count"])
def _top_tokens_kernel(logits_ptr, values_ptr, ids_ptr, stride, width, count, BLOCK: tl.constexpr):
    """One row a program: the best of those behind the last one found, as often as is asked."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    last = float("inf")
    last_id = -1
    for place in range(count):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], _NONE, tl.int32)
        for start in range(0, width, BLOCK):
            columns = start + lanes
            inside = columns < width
            x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=float("-inf"))
            is_left = inside & ((x < last) | ((x == last) & (columns > last_id)))
            is_better = is_left & ((x > best) | (best_id == _NONE))
            best = tl.where(is_better, x, best)
            best_id = tl.where(is_better, columns, best_id)
        last = tl.max(best, axis=0)
        last_id = tl.min(tl.where(best == last, best_id, _NONE), axis=0)
        tl.store(values_ptr + row * count + place, last)
        tl.store(ids_ptr + row * count + place, tl.minimum(last_id, width - 1).to(tl.int64))
