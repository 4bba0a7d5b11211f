"""A few weights of each row kept apart in full precision, added to a product of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import tl, triton

_ROWS, _TOKENS = 32, 8


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A sparse matrix by rows (CSR)."""

    starts: Tensor
    """[out + 1] int32: where each row's entries begin."""
    columns: Tensor
    """[count] int32."""
    values: Tensor
    """[count] float32."""


def sparse_rows(rows: Tensor, columns: Tensor, values: Tensor, num_out: int) -> SparseRows:
    """Sort entries by row."""
    order = torch.argsort(rows, stable=True)
    counts = torch.bincount(rows, minlength=num_out)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return SparseRows(
        starts.to(torch.int32),
        columns[order].to(torch.int32).contiguous(),
        values[order].float().contiguous(),
    )


def add_sparse_ref(x: Tensor, weight: SparseRows, out: Tensor) -> None:
    """Say in plain torch what ``add_sparse`` must do."""
    counts = weight.starts.diff().long()
    rows = torch.repeat_interleave(torch.arange(counts.shape[0], device=x.device), counts)
    products = x.float()[:, weight.columns.long()] * weight.values
    out.copy_(out.float().index_add_(1, rows, products))


def add_sparse(x: Tensor, weight: SparseRows, out: Tensor) -> None:
    """Add ``x W^T`` of a sparse W to ``out`` in place.

    Args:
        x: [num_tokens, in], contiguous.
        weight: [out, in].
        out: [num_tokens, out], contiguous.

    Raises:
        ValueError: shapes do not fit together.
    """
    if out.shape != (x.shape[0], weight.starts.shape[0] - 1) or not (
        x.is_contiguous() and out.is_contiguous()
    ):
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.shape)} do not fit the weight, or have gaps")
    if x.device.type != "cuda":
        add_sparse_ref(x, weight, out)
        return
    _launch(x, weight, out)


def _launch(x: Tensor, weight: SparseRows, out: Tensor) -> None:
    num_tokens, num_out = out.shape
    if num_tokens == 0:
        return
    _add_sparse_kernel[(triton.cdiv(num_out, _ROWS), triton.cdiv(num_tokens, _TOKENS))](
        x,
        weight.starts,
        weight.columns,
        weight.values,
        out,
        num_tokens,
        NUM_OUT=num_out,
        WIDTH=x.shape[1],
        ROWS=_ROWS,
        TOKENS=_TOKENS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _add_sparse_kernel(
    x_ptr,
    starts_ptr,
    columns_ptr,
    values_ptr,
    out_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The entries of some rows, one of each at a time, for some tokens a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_row = rows < NUM_OUT
    is_token = tokens < num_tokens
    starts = tl.load(starts_ptr + rows, mask=is_row, other=0)
    counts = tl.load(starts_ptr + rows + 1, mask=is_row, other=0) - starts
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for entry in range(tl.max(counts, axis=0)):
        inside = entry < counts
        columns = tl.load(columns_ptr + starts + entry, mask=inside, other=0)
        values = tl.load(values_ptr + starts + entry, mask=inside, other=0.0)
        x = tl.load(
            x_ptr + tokens[None, :] * WIDTH + columns[:, None],
            mask=inside[:, None] & is_token[None, :],
            other=0.0,
        )
        acc += values[:, None] * x.to(tl.float32)
    place = out_ptr + tokens[None, :] * NUM_OUT + rows[:, None]
    both = is_row[:, None] & is_token[None, :]
    acc += tl.load(place, mask=both, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=both)
