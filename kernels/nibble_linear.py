"""Products with 4-bit codes on FP8 tensor cores, without unpacking: a nibble *is* an FP8 number.

The byte 0000abcd read as e4m3 is abcd / 512: below 8 it is subnormal, from 8 on the lowest exponent with three bits of
mantissa, and both count in steps of 2^-9. So half a register of codes becomes an operand by one "and". Activations
are the sum of two FP8 numbers, which keep eight significant bits, as many as bfloat16 has; zero points and offsets
multiply the sums of activations over groups, which whoever rounds the activations writes beside them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels.codes import PackedCodes, dequantize_ref, unpack_codes
from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, pdl_options, tl, triton
from kernels.scaled_rows import ScaledRows
from kernels.splits import ProductTiles, add_splits, splits_for

MIN_GROUP = 32
"""The shortest product of FP8 tensor cores."""
MAX_TOKENS = 191
"""Beyond it the weight is better unpacked as a whole (``kernels.coded_linear``)."""
_CHUNK = 16
"""Groups whose offsets are multiplied at once."""


@functools.cache
def has_float8(device: torch.device) -> bool:
    """True where there are FP8 tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def can_multiply(packed: PackedCodes) -> bool:
    """True for weights that ``nibble_linear`` takes."""
    is_plain = packed.is_4bit and packed.table is None and packed.scales is not None
    return is_plain and packed.group >= MIN_GROUP


def nibble_linear_ref(x: ScaledRows, packed: PackedCodes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Say in plain torch what ``nibble_linear`` must return."""
    assert x.low is not None, "activations are two numbers each"
    rows = (x.values.float() + x.low.float()) * x.scales[:, None]
    out = rows @ dequantize_ref(unpack_codes(packed)).T
    return (out if bias is None else out + bias.float()).to(dtype)


def nibble_linear(
    x: ScaledRows,
    packed: PackedCodes,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """Return ``x W^T + b`` in ``dtype``.

    Args:
        x: [num_tokens, in] as two FP8 numbers each, with sums over the weight's groups.
        packed: a weight that ``can_multiply``.
        bias: [out] or None.
        dtype: of the result.
        tiles: how to cut it; None: as measured to be good.

    Raises:
        ValueError: shapes, types or groups do not fit together.
    """
    if x.low is None or x.sums is None or x.values.shape[1] != packed.width or not can_multiply(packed):
        raise ValueError(f"x {tuple(x.values.shape)} does not fit a weight of {packed.width} columns")
    if x.sums.shape[1] != packed.width // packed.group:
        raise ValueError(f"{x.sums.shape[1]} sums a row, {packed.width // packed.group} groups")
    if x.values.device.type != "cuda":
        return nibble_linear_ref(x, packed, bias, dtype)
    return _launch(x, packed, bias, dtype, tiles)


def nibble_tiles(num_tokens: int, num_out: int, width: int, group: int) -> ProductTiles:
    """Choose tiles for a product; splits as searched on an H200 with the shapes of an 8B model."""
    step, num_steps = max(64 // group, 1), -(-width // (2 * group))
    if num_tokens > 32:
        splits = splits_for(num_out, 64, 256, num_steps)
        return ProductTiles(64, 64, splits, step, num_warps=4, num_stages=3)
    splits = splits_for(num_out, 64, 400, num_steps)
    tokens = 16 if num_tokens <= 16 else 32
    return ProductTiles(64, tokens, splits, step, num_warps=4, num_stages=4)


def _launch(
    x: ScaledRows,
    packed: PackedCodes,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: ProductTiles | None = None,
) -> Tensor:
    num_tokens, num_out = x.values.shape[0], packed.num_out
    out = torch.empty(num_tokens, num_out, dtype=dtype, device=packed.codes.device)
    if num_tokens == 0:
        return out
    tiles = tiles or nibble_tiles(num_tokens, num_out, packed.width, packed.group)
    num_steps = packed.codes.shape[1] // packed.group
    per_split, splits = tiles.cut(num_steps)
    partial = out.new_empty(splits, num_tokens, num_out, dtype=torch.float32) if splits > 1 else out
    pdl = has_pdl(out.device)
    _nibble_linear_kernel[(triton.cdiv(num_out, tiles.rows), splits, triton.cdiv(num_tokens, tiles.tokens))](
        x.values,
        x.low,
        x.scales,
        x.sums,
        packed.codes,
        packed.scales,
        packed.zeros if packed.zeros is not None else packed.codes,
        packed.offsets if packed.offsets is not None else packed.codes,
        bias if bias is not None else out,
        partial,
        num_tokens,
        NUM_OUT=num_out,
        WIDTH=packed.width,
        ROW_BYTES=packed.codes.shape[1],
        GROUP=packed.group,
        MIDDLE=packed.middle,
        HAS_ZEROS=packed.zeros is not None,
        HAS_OFFSETS=packed.offsets is not None,
        HAS_BIAS=bias is not None and splits == 1,
        PER_SPLIT=per_split,
        NUM_STEPS=num_steps,
        IS_SPLIT=splits > 1,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        UNROLL=tiles.step,
        CHUNK=_CHUNK,
        IS_PACKED=out.device.type == "cuda",
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    return out if splits == 1 else add_splits(partial, bias, out)


@triton.jit
def _half_of(codes, HALF: tl.constexpr, IS_PACKED: tl.constexpr):
    """Low (0) or high (1) nibbles; four bytes an instruction where ``IS_PACKED``, which the interpreter cannot do."""
    if IS_PACKED:
        if HALF == 0:
            nibbles = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [codes], dtype=tl.uint8, is_pure=True, pack=4
            )
        else:
            nibbles = tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
                "=r,r",
                [codes],
                dtype=tl.uint8,
                is_pure=True,
                pack=4,
            )
    else:
        nibbles = codes & 15 if HALF == 0 else codes >> 4
    return nibbles


@triton.jit
def _product(
    nibbles,
    group_index,
    tokens,
    is_token,
    high_ptr,
    low_ptr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """Return [rows, tokens]: one group's codes, a 512th each, times the sum of two numbers."""
    columns = group_index * GROUP + tl.arange(0, GROUP)
    inside = is_token[None, :]
    if IS_PADDED:
        inside = inside & (columns < WIDTH)[:, None]
    place = tokens.to(tl.int64)[None, :] * WIDTH + columns[:, None]
    weight = nibbles.to(tl.float8e4nv, bitcast=True)
    part = tl.dot(weight, tl.load(high_ptr + place, mask=inside, other=0.0))
    return tl.dot(weight, tl.load(low_ptr + place, mask=inside, other=0.0), part)


@triton.jit
def _offset_product(
    rows,
    tokens,
    is_token,
    first_group,
    end_group,
    sums_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    NUM_OUT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return [rows, tokens]: what is added to the codes of each group times the group's sum of activations."""
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(first_group, end_group, CHUNK, num_stages=1):
        groups = start + tl.arange(0, CHUNK)
        is_group = (groups < end_group) & (groups < NUM_GROUPS)
        place = groups[None, :] * NUM_OUT + rows[:, None]
        if HAS_OFFSETS:
            added = tl.load(offsets_ptr + place, mask=is_group[None, :], other=0.0).to(tl.float32)
        else:
            added = -tl.load(scales_ptr + place, mask=is_group[None, :], other=0.0).to(tl.float32)
            if HAS_ZEROS:
                added *= tl.load(zeros_ptr + place, mask=is_group[None, :], other=0).to(tl.float32)
            else:
                added *= MIDDLE
        sums = tl.load(
            sums_ptr + tokens[None, :] * NUM_GROUPS + groups[:, None],
            mask=is_group[:, None] & is_token[None, :],
            other=0.0,
        )
        acc = tl.dot(added, sums, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _nibble_linear_kernel(
    high_ptr,
    low_ptr,
    x_scales_ptr,
    sums_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some weight rows times some tokens over a part of the inner axis a program; a step is two groups."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    is_row = rows < NUM_OUT
    kept_rows = tl.minimum(rows, NUM_OUT - 1) if NUM_OUT % ROWS else rows
    place = codes_ptr + kept_rows.to(tl.int64)[:, None] * ROW_BYTES + tl.arange(0, GROUP)[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    first = split * PER_SPLIT
    last = tl.minimum(first + PER_SPLIT, NUM_STEPS)
    is_padded: tl.constexpr = 2 * NUM_STEPS * GROUP > WIDTH or NUM_STEPS % UNROLL > 0
    # Scales are asked for an iteration ahead: nothing else hides how long they take.
    scale_place = scales_ptr + kept_rows
    low_scales = tl.load(scale_place + 2 * first * NUM_OUT)
    high_scales = tl.load(scale_place + (2 * first + 1) * NUM_OUT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(first, last, UNROLL):
        for inner in tl.static_range(UNROLL):
            step = start + inner
            following = tl.minimum(step + 1, NUM_STEPS - 1)
            next_low = tl.load(scale_place + 2 * following * NUM_OUT)
            next_high = tl.load(scale_place + (2 * following + 1) * NUM_OUT)
            if NUM_STEPS % UNROLL:
                codes = tl.load(place + step * GROUP, mask=(step < NUM_STEPS) & (rows >= 0)[:, None], other=0)
            else:
                codes = tl.load(place + step * GROUP)
            for half in tl.static_range(2):
                part = _product(
                    _half_of(codes, half, IS_PACKED),
                    2 * step + half,
                    tokens,
                    is_token,
                    high_ptr,
                    low_ptr,
                    WIDTH,
                    GROUP,
                    is_padded,
                )
                scales = low_scales if half == 0 else high_scales
                acc += part * (scales.to(tl.float32) * 512.0)[:, None]
            low_scales = next_low
            high_scales = next_high
    acc += _offset_product(
        kept_rows,
        tokens,
        is_token,
        2 * first,
        2 * last,
        sums_ptr,
        scales_ptr,
        zeros_ptr,
        offsets_ptr,
        NUM_OUT,
        WIDTH // GROUP,
        MIDDLE,
        HAS_ZEROS,
        HAS_OFFSETS,
        ROWS,
        TOKENS,
        CHUNK,
    )
    acc *= tl.load(x_scales_ptr + tokens, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out_rows = tokens.to(tl.int64)
    if IS_SPLIT:
        out_rows += tl.cast(split, tl.int64) * num_tokens
    tl.store(
        out_ptr + out_rows[None, :] * NUM_OUT + rows[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_token[None, :],
    )
