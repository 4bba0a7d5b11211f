"""Products of one row, bound by reading the weight once, with what stands before and after folded in.

A decode step of one request is a walk through all weights, and each extra kernel a pause in it. So the norm is
computed beside the product of its input, the residual is added where the product is written, and the gate's SiLU
meets the up projection in the registers that hold both. From two rows on tensor cores are faster (measured on an H200).
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


def norm_linear_ref(
    x: Tensor, norm: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Say in plain torch what ``norm_linear`` must return."""
    normed = x.float() if norm is None else rms_norm_ref(x.float(), norm, eps)
    out = normed @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``rms_norm(x) W^T + b``, without rounding between norm and product.

    Args:
        x: [1, in], contiguous.
        norm: [in], the norm's weight; None for no norm.
        weight: [out, in], contiguous.
        bias: [out] or None.
        eps: of the norm.
        out: [1, out], contiguous; None: a new tensor.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, norm, weight)
    out = x.new_empty(1, weight.shape[0]) if out is None else out
    _launch(x, norm, weight, bias, None, out, eps)
    return out


def linear_add_ref(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Say in plain torch what ``linear_add`` must do."""
    residual.copy_(residual.float() + x.float() @ weight.float().T)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Add ``x W^T`` to ``residual`` [1, out] in place.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, None, weight)
    if residual.shape != (1, weight.shape[0]) or not residual.is_contiguous():
        raise ValueError(
            f"residual {tuple(residual.shape)} does not take x {tuple(x.shape)} times the weight"
        )
    _launch(x, None, weight, None, residual, residual, 0.0)


def norm_gate_up_ref(x: Tensor, norm: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Say in plain torch what ``norm_gate_up`` must return."""
    normed = x.float() if norm is None else rms_norm_ref(x.float(), norm, eps)
    gate, up = (normed @ weight.float().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(x.dtype)


def norm_gate_up(x: Tensor, norm: Tensor | None, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``silu(gate) * up`` of the normalised ``x``; ``weight`` [2 * intermediate, in] holds gate first.

    ``norm`` None takes ``x`` as it is.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x, norm, weight)
    out = x.new_empty(1, weight.shape[0] // 2)
    _launch(x, norm, weight, None, None, out, eps, is_gated=True)
    return out


def _check(x: Tensor, norm: Tensor | None, weight: Tensor) -> None:
    if x.shape != (1, weight.shape[1]):
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}: one row is needed")
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
    width, num_out = x.shape[1], out.shape[1]
    step, rows, num_warps = gemv_tiles(width, is_gated, residual is not None, norm is not None)
    pdl = has_pdl(x.device)
    _gemv_kernel[(triton.cdiv(num_out, rows),)](
        x,
        norm if norm is not None else x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        eps,
        NUM_OUT=num_out,
        WIDTH=width,
        ROWS=rows,
        STEP=step,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        IS_EVEN=width % step == 0 and num_out % rows == 0,
        PDL=pdl,
        num_warps=num_warps,
        **pdl_options(pdl),
    )


def gemv_tiles(width: int, is_gated: bool, has_residual: bool, has_norm: bool = True) -> tuple[int, int, int]:
    """Return columns a step, weight rows a program, warps: the fastest of 14 on an H200 for each use."""
    if width <= 1024:
        return (
            next_power_of_2(width),
            2 if is_gated or has_residual else 4,
            4 if is_gated or has_residual else 8,
        )
    if has_residual or width % 2048:  # a step that divides the width needs no masks
        return 512, 2 if is_gated else 4, 4
    if is_gated:
        return (2048 if has_norm else 1024), 1, 4
    return (1024, 4, 4) if width == 2048 and not has_norm else (2048, 2, 8)


@triton.jit
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few rows of the weight a program: products are kept apart to the end and summed once."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    is_row = rows < NUM_OUT
    place = weight_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    # Weights are nobody's result: the first are on their way while the kernel ahead still runs.
    weight = _load_weight(place, is_row, columns, 0, WIDTH, IS_EVEN)
    if IS_GATED:
        up = _load_weight(place + NUM_OUT * WIDTH, is_row, columns, 0, WIDTH, IS_EVEN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    x, squares = _load_x(x_ptr, norm_ptr, columns, 0, WIDTH, IS_EVEN, HAS_NORM)
    acc = weight.to(tl.float32) * x[None, :]
    if IS_GATED:
        acc_up = up.to(tl.float32) * x[None, :]
    for start in tl.range(STEP, WIDTH, STEP, loop_unroll_factor=2):
        weight = _load_weight(place, is_row, columns, start, WIDTH, IS_EVEN)
        if IS_GATED:
            up = _load_weight(place + NUM_OUT * WIDTH, is_row, columns, start, WIDTH, IS_EVEN)
        x, more_squares = _load_x(x_ptr, norm_ptr, columns, start, WIDTH, IS_EVEN, HAS_NORM)
        squares += more_squares
        acc += weight.to(tl.float32) * x[None, :]
        if IS_GATED:
            acc_up += up.to(tl.float32) * x[None, :]
    out = tl.sum(acc, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)
        out *= scale
    if IS_GATED:
        up_out = tl.sum(acc_up, axis=1)
        if HAS_NORM:
            up_out *= scale
        out = out * tl.sigmoid(out) * up_out
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        out += residual
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _load_weight(place, is_row, columns, start, WIDTH: tl.constexpr, IS_EVEN: tl.constexpr):
    """A tile of the weight; without masks loads are 16 bytes wide."""
    if IS_EVEN:
        weight = tl.load(place + start, eviction_policy="evict_first")
    else:
        inside = is_row[:, None] & (start + columns < WIDTH)[None, :]
        weight = tl.load(place + start, mask=inside, other=0.0, eviction_policy="evict_first")
    return weight


@triton.jit
def _load_x(
    x_ptr, norm_ptr, columns, start, WIDTH: tl.constexpr, IS_EVEN: tl.constexpr, HAS_NORM: tl.constexpr
):
    """The input's columns, times the norm's weight, and their squares."""
    if IS_EVEN:
        x = tl.load(x_ptr + start + columns).to(tl.float32)
    else:
        x = tl.load(x_ptr + start + columns, mask=start + columns < WIDTH, other=0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        x *= tl.load(norm_ptr + start + columns, mask=start + columns < WIDTH, other=0.0).to(tl.float32)
    return x, squares
