"""The logarithm of a row's sum of exponentials, in one order of summation whatever else there is.

``torch.logsumexp`` on CUDA cuts its sums by how many rows there are, and so departs in the last bit when a row has
others beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import tl, triton

_BLOCK = 4096


def log_sum_exp_ref(x: Tensor) -> Tensor:
    """Say in plain torch what ``log_sum_exp`` must return."""
    return x.logsumexp(-1)


def log_sum_exp(x: Tensor) -> Tensor:
    """Return ``log(sum(exp(x)))`` of each row; [num_rows] float32.

    Args:
        x: [num_rows, width] float32, rows contiguous; minus infinity counts nothing.

    Raises:
        ValueError: ``x`` is of another type, or has rows that are not contiguous.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}: rows of contiguous float32 are needed")
    return _launch(x) if x.device.type == "cuda" else log_sum_exp_ref(x)


def _launch(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0])
    if x.shape[0]:
        _log_sum_exp_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=_BLOCK, num_warps=8)
    return out


# How an address is aligned would change the layout, and with it the order in which lanes are summed.
@triton.jit(do_not_specialize=["x_ptr"])
def _log_sum_exp_kernel(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    """One row a program: each lane sums its columns from left to right, then the lanes are summed."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + row * stride + start + lanes, mask=start + lanes < width, other=float("-inf"))
        highest = tl.maximum(highest, x)
    top = tl.max(highest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(x_ptr + row * stride + start + lanes, mask=start + lanes < width, other=float("-inf"))
        sums += tl.exp(x - shift)
    tl.store(out_ptr + row, shift + tl.log(tl.sum(sums, axis=0)))
