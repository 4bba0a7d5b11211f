"""Products of a few rows (1 to 8), bound by reading the weight once, with what stands before and after folded in.

At such batches a decode step is a walk through all weights: each extra kernel is a pause in it. So the norm is
computed beside the product of its input, the residual is added where the product is written, and the gate's SiLU
meets the up projection in the registers that hold both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import (
    gdc_launch_dependents,
    gdc_wait,
    has_pdl,
    next_power_of_2,
    pdl_options,
    tl,
    triton,
)
from kernels.rms_norm import rms_norm_ref

MAX_ROWS = 8
"""Most rows of ``x``. From 2 rows on an 8B model's cuBLAS products are faster (measured on an H200)."""
_STEP = 2048
"""Columns a program reads at once: 16 bytes a load, two loads a thread of four warps."""


def norm_linear_ref(
    x: Tensor, norm: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Say in plain torch what ``norm_linear`` must return."""
    normed = x.float() if norm is None else rms_norm_ref(x.float(), norm, eps)
    out = normed @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def norm_linear(
    x: Tensor, norm: Tensor | None, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Return ``rms_norm(x) W^T + b``, without rounding between norm and product.

    Args:
        x: [1 to 8, in], contiguous.
        norm: [in], the norm's weight; None for no norm.
        weight: [out, in], contiguous.
        bias: [out] or None.
        eps: of the norm.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, norm, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch(x, norm, weight, bias, None, out, eps)
    return out


def linear_add_ref(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Say in plain torch what ``linear_add`` must do."""
    residual.copy_(residual.float() + x.float() @ weight.float().T)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Add ``x W^T`` to ``residual`` [rows, out] in place.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, None, weight)
    if residual.shape != (x.shape[0], weight.shape[0]) or not residual.is_contiguous():
        raise ValueError(
            f"residual {tuple(residual.shape)} does not take x {tuple(x.shape)} times the weight"
        )
    _launch(x, None, weight, None, residual, residual, 0.0)


def norm_gate_up_ref(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say in plain torch what ``norm_gate_up`` must return."""
    gate, up = (rms_norm_ref(x.float(), norm, eps) @ weight.float().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(x.dtype)


def norm_gate_up(x: Tensor, norm: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``silu(gate) * up`` of the normalised ``x``; ``weight`` [2 * intermediate, in] holds gate first.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, norm, weight)
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, norm, weight, None, None, out, eps, is_gated=True)
    return out


def _check(x: Tensor, norm: Tensor | None, weight: Tensor) -> None:
    if not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}, or has too many rows"
        )
    if norm is not None and norm.shape != x.shape[1:]:
        raise ValueError(f"norm {tuple(norm.shape)} does not fit x {tuple(x.shape)}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous")


def _launch(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    eps: float,
    is_gated: bool = False,
) -> None:
    num_rows, width = x.shape
    num_out = out.shape[1]
    step, rows_out, num_warps = gemv_tiles(width, is_gated)
    pdl = has_pdl(x.device)
    _gemv_kernel[(triton.cdiv(num_out, rows_out),)](
        x,
        norm if norm is not None else x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        num_rows,
        num_out,
        eps,
        WIDTH=width,
        ROWS=next_power_of_2(num_rows),
        ROWS_OUT=rows_out,
        STEP=step,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        IS_EVEN=width % step == 0 and num_out % rows_out == 0 and num_rows == next_power_of_2(num_rows),
        PDL=pdl,
        num_warps=num_warps,
        **pdl_options(pdl),
    )


def gemv_tiles(width: int, is_gated: bool) -> tuple[int, int, int]:
    """Return columns a step, output rows a program, warps: 16 bytes a thread and load, some loads in flight."""
    step = min(next_power_of_2(width), _STEP)
    rows_out = 1 if is_gated else max(_STEP // step, 1)
    return step, rows_out, max(min(step * rows_out // 512, 4), 1)


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_out,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_OUT: tl.constexpr,
    STEP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows of the weight against all rows of x: products are kept apart to the end, summed once."""
    outs = tl.program_id(0) * ROWS_OUT + tl.arange(0, ROWS_OUT)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    is_row = rows < num_rows
    is_out = outs < num_out
    place = weight_ptr + outs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    acc = tl.zeros([ROWS, ROWS_OUT, STEP], tl.float32)
    acc_up = tl.zeros([ROWS, ROWS_OUT, STEP], tl.float32)
    squares = tl.zeros([ROWS, STEP], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for start in tl.range(0, WIDTH, STEP, loop_unroll_factor=2):
        # Without masks where none is needed: they keep loads from being 16 bytes wide.
        inside = start + columns < WIDTH
        weight_inside = None if IS_EVEN else is_out[:, None] & inside[None, :]
        x_inside = None if IS_EVEN else is_row[:, None] & inside[None, :]
        weight = tl.load(place + start, mask=weight_inside, eviction_policy="evict_first")
        if IS_GATED:
            up_place = place + num_out.to(tl.int64) * WIDTH + start
            up = tl.load(up_place, mask=weight_inside, eviction_policy="evict_first")
        x = tl.load(x_ptr + rows[:, None] * WIDTH + start + columns[None, :], mask=x_inside).to(tl.float32)
        if not IS_EVEN:
            # What a mask leaves out is not defined: it may be NaN.
            x = tl.where(x_inside, x, 0.0)
            weight = tl.where(weight_inside, weight, 0.0)
            if IS_GATED:
                up = tl.where(weight_inside, up, 0.0)
        if HAS_NORM:
            squares += x * x
            norm = tl.load(norm_ptr + start + columns, mask=None if IS_EVEN else inside)
            x *= tl.where(inside, norm.to(tl.float32), 0.0)[None, :]
        acc += x[:, None, :] * weight.to(tl.float32)[None, :, :]
        if IS_GATED:
            acc_up += x[:, None, :] * up.to(tl.float32)[None, :, :]
    out = tl.sum(acc, axis=2)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)[:, None]
        out *= scale
    if IS_GATED:
        up_out = tl.sum(acc_up, axis=2)
        if HAS_NORM:
            up_out *= scale
        out = out * tl.sigmoid(out) * up_out
    if HAS_BIAS:
        out += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    spot = rows[:, None] * num_out + outs[None, :]
    inside_out = is_row[:, None] & is_out[None, :]
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + spot, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + spot, out.to(out_ptr.dtype.element_ty), mask=inside_out)
