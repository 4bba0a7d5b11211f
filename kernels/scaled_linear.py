"""Products of 8-bit activations and 8-bit weights, FP8 (e4m3) or INT8, scaled by row and by column afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, pdl_options, tl, triton
from kernels.scaled_rows import FLOAT8, ScaledRows
from kernels.splits import ProductTiles, add_splits, splits_for

LIBRARY_TOKENS = 64
"""Up to so many tokens the kernel of this file is faster: the library's scales rows and columns at half its speed."""
_LIBRARY_MULTIPLE = 16
"""Columns of either side that ``torch._scaled_mm`` takes."""


def scaled_linear_ref(
    x: ScaledRows, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Say in plain torch what ``scaled_linear`` must return."""
    out = (x.values.double() @ weight.double().T).float() * x.scales[:, None] * scales.float()
    return (out if bias is None else out + bias.float()).to(dtype)


def scaled_linear(
    x: ScaledRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return ``x W^T + b`` in ``dtype``.

    Args:
        x: [num_tokens, in], of the weight's type.
        weight: [out, in] float8_e4m3fn or int8, contiguous.
        scales: [out] float32.
        bias: [out] or None.
        dtype: of the result.

    Raises:
        ValueError: shapes or types do not fit together.
    """
    values = x.values
    if values.dim() != 2 or values.shape[1] != weight.shape[1] or values.dtype != weight.dtype:
        raise ValueError(
            f"x {tuple(values.shape)} {values.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}"
        )
    if scales.shape != weight.shape[:1] or not (values.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"scales {tuple(scales.shape)}; values and weight must be contiguous")
    if values.device.type != "cuda":
        return scaled_linear_ref(x, weight, scales, bias, dtype)
    is_library = (
        values.shape[0] > LIBRARY_TOKENS
        and weight.dtype == FLOAT8
        and dtype == torch.bfloat16
        and all(size % _LIBRARY_MULTIPLE == 0 for size in weight.shape)
    )
    if is_library:
        out = torch._scaled_mm(
            values,
            weight.t(),
            scale_a=x.scales[:, None],
            scale_b=scales[None, :],
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return out if bias is None else out.add_(bias)
    return _launch(x, weight, scales, bias, dtype)


def scaled_tiles(num_tokens: int, num_out: int, width: int) -> ProductTiles:
    """Choose tiles for a product, as searched on an H200 with the shapes of an 8B model."""
    if num_tokens > LIBRARY_TOKENS:
        return ProductTiles(128, 128, 1, 64, num_warps=8, num_stages=3)
    splits = splits_for(num_out, 64, 256, width // 256)
    if num_tokens <= 32:
        tokens = 16 if num_tokens <= 16 else 32
        return ProductTiles(64, tokens, splits, 256, num_warps=4, num_stages=4)
    if splits == 1:
        return ProductTiles(128, 64, 1, 128, num_warps=8, num_stages=4)
    return ProductTiles(64, 64, splits, 128, num_warps=4, num_stages=4)


def _launch(
    x: ScaledRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: ProductTiles | None = None,
) -> Tensor:
    num_tokens, width = x.values.shape
    num_out = weight.shape[0]
    out = torch.empty(num_tokens, num_out, dtype=dtype, device=weight.device)
    if num_tokens == 0:
        return out
    tiles = tiles or scaled_tiles(num_tokens, num_out, width)
    per_split, splits = tiles.cut(width)
    partial = out.new_empty(splits, num_tokens, num_out, dtype=torch.float32) if splits > 1 else out
    pdl = has_pdl(weight.device)
    _scaled_linear_kernel[(triton.cdiv(num_out, tiles.rows), splits, triton.cdiv(num_tokens, tiles.tokens))](
        x.values,
        x.scales,
        weight,
        scales,
        bias if bias is not None else scales,
        partial,
        num_tokens,
        NUM_OUT=num_out,
        WIDTH=width,
        PER_SPLIT=per_split,
        IS_SPLIT=splits > 1,
        HAS_BIAS=bias is not None and splits == 1,
        IS_INT8=weight.dtype == torch.int8,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        STEP=tiles.step,
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    return out if splits == 1 else add_splits(partial, bias, out)


@triton.jit(do_not_specialize=["num_tokens"])
def _scaled_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INT8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some weight rows times some tokens over a part of the inner axis a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_row = rows < NUM_OUT
    is_token = tokens < num_tokens
    columns = tl.arange(0, STEP)
    kept_rows = tl.minimum(rows, NUM_OUT - 1) if NUM_OUT % ROWS else rows
    place = weight_ptr + kept_rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x_place = x_ptr + tokens.to(tl.int64)[None, :] * WIDTH + columns[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.int32 if IS_INT8 else tl.float32)
    first = split * PER_SPLIT
    last = tl.minimum(first + PER_SPLIT, WIDTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(first, last, STEP):
        if WIDTH % STEP:
            inside = start + columns < WIDTH
            weight = tl.load(place + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_place + start, mask=inside[:, None] & is_token[None, :], other=0.0)
        else:
            weight = tl.load(place + start)
            x = tl.load(x_place + start, mask=is_token[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, out_dtype=tl.int32 if IS_INT8 else tl.float32)
    out = acc.to(tl.float32) * tl.load(scales_ptr + kept_rows)[:, None]
    out *= tl.load(x_scales_ptr + tokens, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + kept_rows).to(tl.float32)[:, None]
    out_rows = tokens.to(tl.int64)
    if IS_SPLIT:
        out_rows += tl.cast(split, tl.int64) * num_tokens
    tl.store(
        out_ptr + out_rows[None, :] * NUM_OUT + rows[:, None],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_token[None, :],
    )
