"""Products with weights kept as codes (AWQ, GPTQ, GGUF, NF4, SqueezeLLM): unpacked in registers, on the way to use.

The weight is the left operand: on Hopper that one may lie in registers, so what is unpacked there need not pass through
shared memory. Codes minus their zero point are small integers, exact in 16 bits; the group's scale is applied to
the group's sum in float32, so that nothing is rounded before the product. Many tokens share one unpacking of the whole
weight instead, followed by the library's product: from some hundred tokens on arithmetic is what costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.codes import PackedCodes, dequantize_ref, unpack_codes
from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, pdl_options, tl, triton
from kernels.splits import ProductTiles, add_splits, splits_for

DENSE_TOKENS = 129
"""From so many tokens on the weight is unpacked as a whole: measured on an H200."""
_UNPACK_BYTES = 4096


def coded_linear_ref(x: Tensor, packed: PackedCodes, bias: Tensor | None = None) -> Tensor:
    """Say in plain torch what ``coded_linear`` must return."""
    out = x.float() @ dequantize_ref(unpack_codes(packed)).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def coded_linear(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tiles: ProductTiles | None = None,
) -> Tensor:
    """Return ``x W^T + b`` for a weight of codes.

    Sources: Lin et al. 2023, arXiv:2306.00978 (AWQ); Frantar et al. 2022, arXiv:2210.17323 (GPTQ); splitting the
    inner axis among programs: Osama et al. 2023, arXiv:2301.03598.

    Args:
        x: [num_tokens, in], contiguous; float32, float16 or bfloat16.
        packed: the weight, for activations of x's dtype.
        bias: [out] or None.
        out: [num_tokens, out], contiguous; None: a new tensor.
        tiles: how to cut it; None: as measured to be good.

    Raises:
        ValueError: shapes do not fit together.
    """
    if x.dim() != 2 or x.shape[1] != packed.width or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {packed.width} columns, or has gaps")
    if x.device.type != "cuda":
        result = coded_linear_ref(x, packed, bias)
        return result if out is None else out.copy_(result)
    if x.shape[0] >= DENSE_TOKENS and tiles is None:
        weight = unpack(packed, x.dtype)
        if bias is None and out is not None:
            return torch.mm(x, weight.t(), out=out)
        result = torch.nn.functional.linear(x, weight, bias)
        return result if out is None else out.copy_(result)
    return _launch(x, packed, bias, out, tiles)


def coded_tiles(num_tokens: int, num_out: int, width: int, group: int) -> ProductTiles:
    """Choose tiles for a product, as searched on an H200 with the shapes of an 8B model."""
    step, num_steps = max(64 // group, 1), -(-width // (2 * group))
    if num_tokens > 64:
        return ProductTiles(128, 64, 1, step, num_warps=8, num_stages=3)
    splits = splits_for(num_out, 64, 256, num_steps)
    tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    return ProductTiles(64, tokens, splits, step, num_warps=4, num_stages=4 if tokens == 16 else 3)


def unpack(packed: PackedCodes, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] as plain numbers."""
    if packed.codes.device.type != "cuda":
        return dequantize_ref(unpack_codes(packed)).to(dtype)
    return _launch_unpack(packed, dtype)


def _launch_unpack(packed: PackedCodes, dtype: torch.dtype) -> Tensor:
    out = torch.empty(packed.num_out, packed.width, dtype=dtype, device=packed.codes.device)
    rows = max(_UNPACK_BYTES // packed.group, 1)
    num_steps = packed.codes.shape[1] // packed.group
    pdl = has_pdl(out.device)
    _unpack_kernel[(triton.cdiv(packed.num_out, rows), num_steps)](
        *code_pointers(packed, out),
        out,
        NUM_OUT=packed.num_out,
        WIDTH=packed.width,
        ROW_BYTES=packed.codes.shape[1],
        **code_kind(packed),
        ROWS=rows,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    return out


def _launch(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None,
    out: Tensor | None,
    tiles: ProductTiles | None,
) -> Tensor:
    num_tokens = x.shape[0]
    out = x.new_empty(num_tokens, packed.num_out) if out is None else out
    if num_tokens == 0:
        return out
    tiles = tiles or coded_tiles(num_tokens, packed.num_out, packed.width, packed.group)
    num_steps = packed.codes.shape[1] // packed.group
    per_split, splits = tiles.cut(num_steps)
    token_tiles = triton.cdiv(num_tokens, tiles.tokens)
    partial = x.new_empty(splits, num_tokens, packed.num_out, dtype=torch.float32) if splits > 1 else out
    pdl = has_pdl(x.device)
    _coded_linear_kernel[(triton.cdiv(packed.num_out, tiles.rows), splits, token_tiles)](
        x,
        *code_pointers(packed, x),
        bias if bias is not None else x,
        partial,
        num_tokens,
        NUM_OUT=packed.num_out,
        WIDTH=packed.width,
        ROW_BYTES=packed.codes.shape[1],
        **code_kind(packed),
        HAS_BIAS=bias is not None and splits == 1,
        PER_SPLIT=per_split,
        NUM_STEPS=num_steps,
        IS_SPLIT=splits > 1,
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        UNROLL=tiles.step,
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    return out if splits == 1 else add_splits(partial, bias, out)


def code_pointers(packed: PackedCodes, stand_in: Tensor) -> list[Tensor]:
    """Codes, scales, zeros, offsets, table; ``stand_in`` for what is not there."""
    parts = (packed.scales, packed.zeros, packed.offsets, packed.table)
    return [packed.codes, *(stand_in if part is None else part for part in parts)]


def code_kind(packed: PackedCodes) -> dict[str, int | bool]:
    """The constants that say what a weight is made of."""
    return {
        "GROUP": packed.group,
        "IS_4BIT": packed.is_4bit,
        "MIDDLE": packed.middle,
        "HAS_SCALES": packed.scales is not None,
        "HAS_ZEROS": packed.zeros is not None,
        "HAS_OFFSETS": packed.offsets is not None,
        "HAS_TABLE": packed.table is not None,
        "TABLE_ROW": packed.table.shape[1] if packed.table is not None and packed.table.shape[0] > 1 else 0,
    }


@triton.jit
def _decode(
    codes,
    rows,
    is_row,
    group_index,
    zeros_ptr,
    table_ptr,
    NUM_OUT: tl.constexpr,
    IS_4BIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What codes [rows, group] of one group stand for before scaling, in ``DTYPE``, exactly."""
    # One return: two of different types would not compile, though only one of them stays.
    if HAS_TABLE:
        number = tl.load(table_ptr + rows[:, None] * TABLE_ROW + codes.to(tl.int32))
    else:
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + group_index * NUM_OUT + rows, mask=is_row, other=0).to(tl.int32)
        else:
            zeros = tl.full(rows.shape, MIDDLE, tl.int32)
        if tl.float32 == DTYPE:
            number = codes.to(tl.float32) - zeros.to(tl.float32)[:, None]
        # A code in the lowest bits of the number that 128 (bfloat16) or 1024 (float16) is: one "or" converts it.
        elif tl.float16 == DTYPE:
            biased = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
            number = biased - (zeros + 1024).to(tl.float16)[:, None]
        elif IS_4BIT:
            biased = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
            number = biased - (zeros + 128).to(tl.float32).to(tl.bfloat16)[:, None]
        else:
            number = (codes.to(tl.int16) - zeros.to(tl.int16)[:, None]).to(tl.float32).to(tl.bfloat16)
    return number


@triton.jit
def add_group(
    acc,
    codes,
    rows,
    is_row,
    tokens,
    is_token,
    group_index,
    x_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    table_ptr,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    IS_4BIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """Return ``acc`` [rows, tokens] plus one group's product."""
    columns = group_index * GROUP + tl.arange(0, GROUP)
    inside = is_token[None, :]
    if IS_PADDED:
        inside = inside & (columns < WIDTH)[:, None]
    x = tl.load(x_ptr + tokens.to(tl.int64)[None, :] * WIDTH + columns[:, None], mask=inside, other=0.0)
    weight = _decode(
        codes,
        rows,
        is_row,
        group_index,
        zeros_ptr,
        table_ptr,
        NUM_OUT,
        IS_4BIT,
        MIDDLE,
        HAS_ZEROS,
        HAS_TABLE,
        TABLE_ROW,
        x.dtype,
    )
    part = tl.dot(weight, x, input_precision="ieee")
    if HAS_SCALES:
        scales = tl.load(scales_ptr + group_index * NUM_OUT + rows, mask=is_row, other=0.0)
        part *= scales.to(tl.float32)[:, None]
    acc += part
    if HAS_OFFSETS:
        offsets = tl.load(offsets_ptr + group_index * NUM_OUT + rows, mask=is_row, other=0.0)
        acc += offsets.to(tl.float32)[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return acc


# How many tokens a step has must not lead to a new variant.
@triton.jit(do_not_specialize=["num_tokens"])
def _coded_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_4BIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some weight rows times some tokens over a part of the inner axis a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    # Without masks loads are 16 bytes wide; a constant mask is none.
    is_row = rows < NUM_OUT if NUM_OUT % ROWS else rows >= 0
    kept_rows = tl.minimum(rows, NUM_OUT - 1) if NUM_OUT % ROWS else rows
    place = codes_ptr + kept_rows.to(tl.int64)[:, None] * ROW_BYTES + tl.arange(0, GROUP)[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    first = split * PER_SPLIT
    last = tl.minimum(first + PER_SPLIT, NUM_STEPS)
    is_padded: tl.constexpr = (
        2 * NUM_STEPS if IS_4BIT else NUM_STEPS
    ) * GROUP > WIDTH or NUM_STEPS % UNROLL > 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(first, last, UNROLL):
        for inner in tl.static_range(UNROLL):
            step = start + inner
            if NUM_STEPS % UNROLL:
                codes = tl.load(place + step * GROUP, mask=(step < NUM_STEPS) & (rows >= 0)[:, None], other=0)
            else:
                codes = tl.load(place + step * GROUP, eviction_policy="evict_first")
            if IS_4BIT:
                for half in tl.static_range(2):
                    acc = add_group(
                        acc,
                        codes & 15 if half == 0 else codes >> 4,
                        kept_rows,
                        is_row & (step < NUM_STEPS),
                        tokens,
                        is_token,
                        2 * step + half,
                        x_ptr,
                        scales_ptr,
                        zeros_ptr,
                        offsets_ptr,
                        table_ptr,
                        NUM_OUT,
                        WIDTH,
                        GROUP,
                        IS_4BIT,
                        MIDDLE,
                        HAS_SCALES,
                        HAS_ZEROS,
                        HAS_OFFSETS,
                        HAS_TABLE,
                        TABLE_ROW,
                        is_padded,
                    )
            else:
                acc = add_group(
                    acc,
                    codes,
                    kept_rows,
                    is_row & (step < NUM_STEPS),
                    tokens,
                    is_token,
                    step,
                    x_ptr,
                    scales_ptr,
                    zeros_ptr,
                    offsets_ptr,
                    table_ptr,
                    NUM_OUT,
                    WIDTH,
                    GROUP,
                    IS_4BIT,
                    MIDDLE,
                    HAS_SCALES,
                    HAS_ZEROS,
                    HAS_OFFSETS,
                    HAS_TABLE,
                    TABLE_ROW,
                    is_padded,
                )
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


@triton.jit
def _unpack_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    table_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_4BIT: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group, or pair of groups, of some rows a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    is_row = rows < NUM_OUT
    kept_rows = tl.minimum(rows, NUM_OUT - 1)
    columns = tl.arange(0, GROUP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes = tl.load(codes_ptr + kept_rows.to(tl.int64)[:, None] * ROW_BYTES + step * GROUP + columns[None, :])
    for half in tl.static_range(2 if IS_4BIT else 1):
        if IS_4BIT:
            group_index = 2 * step + half
            part = codes & 15 if half == 0 else codes >> 4
        else:
            group_index = step
            part = codes
        weight = _decode(
            part,
            kept_rows,
            is_row,
            group_index,
            zeros_ptr,
            table_ptr,
            NUM_OUT,
            IS_4BIT,
            MIDDLE,
            HAS_ZEROS,
            HAS_TABLE,
            TABLE_ROW,
            out_ptr.dtype.element_ty,
        ).to(tl.float32)
        if HAS_SCALES:
            scales = tl.load(scales_ptr + group_index * NUM_OUT + kept_rows)
            weight *= scales.to(tl.float32)[:, None]
        if HAS_OFFSETS:
            offsets = tl.load(offsets_ptr + group_index * NUM_OUT + kept_rows)
            weight += offsets.to(tl.float32)[:, None]
        places = group_index * GROUP + columns
        tl.store(
            out_ptr + rows.to(tl.int64)[:, None] * WIDTH + places[None, :],
            weight.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (places < WIDTH)[None, :],
        )
