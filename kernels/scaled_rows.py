"""Activations as 8-bit numbers with a scale for each row: alone, and where a norm or a gate has just written them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.rms_norm import add_rms_norm_ref, rms_norm_ref
from kernels.silu_mul import silu_mul_ref

FLOAT8 = torch.float8_e4m3fn
_LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}
_LEAST_SCALE = 1e-12
"""Of a row of zeros."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows whose numbers are ``values * scales``."""

    values: Tensor
    """[num_tokens, width] float8_e4m3fn or int8."""
    scales: Tensor
    """[num_tokens] float32."""
    low: Tensor | None = None
    """Like ``values``: what rounding to them left, rounded to the same scale; None where that is lost."""
    sums: Tensor | None = None
    """[num_tokens, groups] float32 of ``values + low`` over groups of columns; None where nobody needs them."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a product wants its activations."""

    dtype: torch.dtype
    """float8_e4m3fn or int8."""
    fixed_scale: float | None = None
    """The same scale for all rows, beyond which values are cut off; None: each row's own."""
    sum_group: int = 0
    """Columns of a group: numbers are ``values + low`` then, with sums over groups. 0: ``values`` alone."""


def split_rows_ref(x: Tensor, form: RowFormat) -> ScaledRows:
    """Say in plain torch what rows of a format are."""
    values, scales = quantize_rows_ref(x, form.dtype, form.fixed_scale)
    if form.sum_group == 0:
        return ScaledRows(values, scales)
    low = (x.float() / scales[:, None] - values.float()).to(form.dtype)
    both = values.float() + low.float()
    return ScaledRows(values, scales, low, both.view(x.shape[0], -1, form.sum_group).sum(-1))


def quantize_rows_ref(
    x: Tensor, dtype: torch.dtype, fixed_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Say in plain torch what ``quantize_rows`` must return: values of ``dtype``, and float32 scales."""
    x, largest = x.float(), _LARGEST[dtype]
    if fixed_scale is None:
        scales = (x.abs().amax(-1) / largest).clamp(min=_LEAST_SCALE)
    else:
        scales = torch.full(x.shape[:1], fixed_scale, device=x.device)
    scaled = (x / scales[:, None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def quantize_rows(x: Tensor, form: RowFormat) -> ScaledRows:
    """Round each row of ``x`` to 8 bits, its largest value becoming the type's largest.

    Args:
        x: [num_tokens, width], contiguous.
        form: type, scale and what else is wanted.

    Raises:
        ValueError: ``x`` has gaps.
    """
    _check(x)
    if x.device.type != "cuda":
        return split_rows_ref(x, form)
    return _launch(x, None, None, 0.0, form, x.shape[1])


def rms_norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    form: RowFormat,
) -> ScaledRows:
    """Do what ``rms_norm`` (``residual`` None) or ``add_rms_norm`` does, then quantize the rows.

    Raises:
        ValueError: shapes do not match; nothing was changed.
    """
    _check(x)
    if weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} or the residual")
    if x.device.type != "cuda":
        normed = (
            rms_norm_ref(x, weight, eps) if residual is None else add_rms_norm_ref(x, residual, weight, eps)
        )
        return split_rows_ref(normed, form)
    return _launch(x, residual, weight, eps, form, x.shape[1])


def silu_mul_rows(gate_up: Tensor, form: RowFormat) -> ScaledRows:
    """Do what ``silu_mul`` does, then quantize the rows.

    Raises:
        ValueError: ``gate_up`` has gaps or an odd number of columns.
    """
    _check(gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} has an odd number of columns")
    if gate_up.device.type != "cuda":
        return split_rows_ref(silu_mul_ref(gate_up), form)
    return _launch(gate_up, None, None, 0.0, form, gate_up.shape[1] // 2, is_gated=True)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} must be contiguous rows")


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    form: RowFormat,
    width: int,
    is_gated: bool = False,
) -> ScaledRows:
    num_tokens, dtype, group = x.shape[0], form.dtype, form.sum_group
    values = torch.empty(num_tokens, width, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    low = torch.empty_like(values) if group else None
    sums = scales.new_empty(num_tokens, width // group) if group else None
    rows = ScaledRows(values, scales, low, sums)
    if num_tokens == 0:
        return rows
    block = next_power_of_2(width)
    pdl = has_pdl(x.device)
    _scaled_rows_kernel[(num_tokens,)](
        x,
        residual if residual is not None else x,
        weight if weight is not None else x,
        values,
        scales,
        low if low is not None else values,
        sums if sums is not None else scales,
        eps,
        form.fixed_scale if form.fixed_scale is not None else 1.0,
        WIDTH=width,
        LARGEST=_LARGEST[dtype],
        LEAST_SCALE=_LEAST_SCALE,
        IS_INT8=dtype == torch.int8,
        IS_GATED=is_gated,
        HAS_NORM=weight is not None,
        HAS_RESIDUAL=residual is not None,
        IS_FIXED=form.fixed_scale is not None,
        SUM_GROUP=group,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 1024, 1), 16),
        **pdl_options(pdl),
    )
    return rows


@triton.jit
def _scaled_rows_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scales_ptr,
    low_ptr,
    sums_ptr,
    eps,
    fixed_scale,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_FIXED: tl.constexpr,
    SUM_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if IS_GATED:
        gate = tl.load(x_ptr + token * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + token * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        x = gate * tl.sigmoid(gate) * up
    else:
        x = tl.load(x_ptr + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + token * WIDTH + columns
        total = (x + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    if HAS_NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    if HAS_NORM or IS_GATED:
        # As the unfused kernels write it.
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if IS_FIXED:
        scale = fixed_scale
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, LEAST_SCALE)
    scaled = tl.clamp(x / scale, -LARGEST, LARGEST)
    if IS_INT8:
        # Half to even, as torch rounds: adding and subtracting 1.5 * 2^23 leaves no fraction.
        scaled = (scaled + 12582912.0) - 12582912.0
    values = scaled.to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + token * WIDTH + columns, values, mask=inside)
    if SUM_GROUP:
        low = (scaled - values.to(tl.float32)).to(values_ptr.dtype.element_ty)
        tl.store(low_ptr + token * WIDTH + columns, low, mask=inside)
        both = values.to(tl.float32) + low.to(tl.float32)
        sums = tl.sum(tl.reshape(both, [BLOCK // SUM_GROUP, SUM_GROUP]), axis=1)
        groups = tl.arange(0, BLOCK // SUM_GROUP)
        num_groups: tl.constexpr = WIDTH // SUM_GROUP
        tl.store(sums_ptr + token * num_groups + groups, sums, mask=groups < num_groups)
    tl.store(scales_ptr + token, scale)
