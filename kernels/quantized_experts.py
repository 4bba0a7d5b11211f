"""Experts whose weights stay quantized, as codes of any format or as 8-bit numbers: one launch, as ``kernels.experts``.

All experts' rows lie below each other as those of one matrix; a program's rows are those of its pairs' expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.coded_linear import add_group, code_kind, code_pointers
from kernels.codes import PackedCodes, dequantize_ref, unpack_codes
from kernels.experts import Routing, expert_linear_ref, expert_tile
from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.scaled_rows import ScaledRows


def coded_expert_linear_ref(x: Tensor, packed: PackedCodes, routing: Routing, is_spread: bool) -> Tensor:
    """Say in plain torch what ``coded_expert_linear`` must return."""
    num_experts = routing.starts.shape[0] - 1
    weights = dequantize_ref(unpack_codes(packed)).view(num_experts, -1, packed.width)
    return expert_linear_ref(x, weights, routing, is_spread)


def coded_expert_linear(x: Tensor, packed: PackedCodes, routing: Routing, is_spread: bool) -> Tensor:
    """Do what ``kernels.experts.expert_linear`` does with weights kept as codes.

    Args:
        x: [num_tokens, in], or, with ``is_spread``, [num_pairs, in] in sorted order; contiguous.
        packed: the experts' rows below each other.
        routing: the pairs.
        is_spread: put each result, times the pair's weight, at the pair's own place instead of in sorted order.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(x.shape, x.is_contiguous(), packed.num_out, packed.width, routing, is_spread)
    if x.device.type != "cuda":
        return coded_expert_linear_ref(x, packed, routing, is_spread)
    return _launch_coded(x, packed, routing, is_spread)


def scaled_expert_linear_ref(
    x: ScaledRows, weight: Tensor, scales: Tensor, routing: Routing, is_spread: bool, dtype: torch.dtype
) -> Tensor:
    """Say in plain torch what ``scaled_expert_linear`` must return."""
    rows = x.values.float() * x.scales[:, None]
    weights = (weight.float() * scales[:, None]).view(routing.starts.shape[0] - 1, -1, weight.shape[1])
    return expert_linear_ref(rows, weights, routing, is_spread).to(dtype)


def scaled_expert_linear(
    x: ScaledRows, weight: Tensor, scales: Tensor, routing: Routing, is_spread: bool, dtype: torch.dtype
) -> Tensor:
    """Do what ``kernels.experts.expert_linear`` does with 8-bit weights and activations (FP8 e4m3, or INT8).

    Args:
        x: rows as for ``coded_expert_linear``, of the weight's type.
        weight: [num_experts * out, in], contiguous.
        scales: [num_experts * out] float32.
        routing: the pairs.
        is_spread: as for ``coded_expert_linear``.
        dtype: of the result.

    Raises:
        ValueError: shapes or types do not fit together.
    """
    values = x.values
    _check(values.shape, values.is_contiguous(), weight.shape[0], weight.shape[1], routing, is_spread)
    if values.dtype != weight.dtype or scales.shape != weight.shape[:1] or not weight.is_contiguous():
        raise ValueError(f"x of {values.dtype}, weight of {weight.dtype}, scales {tuple(scales.shape)}")
    if values.device.type != "cuda":
        return scaled_expert_linear_ref(x, weight, scales, routing, is_spread, dtype)
    return _launch_scaled(x, weight, scales, routing, is_spread, dtype)


def _check(
    shape: torch.Size, is_contiguous: bool, num_out: int, width: int, routing: Routing, is_spread: bool
) -> None:
    num_pairs, num_experts = routing.pairs.shape[0], routing.starts.shape[0] - 1
    num_rows = num_pairs if is_spread else num_pairs // routing.top_k
    if shape != (num_rows, width) or num_out % num_experts or not is_contiguous:
        raise ValueError(
            f"x {tuple(shape)} with {num_pairs} pairs does not fit {num_experts} experts of {num_out} x {width}, "
            "or has gaps"
        )


def pairs_a_tile(num_pairs: int, num_experts: int) -> int:
    """By how many pairs an expert has on average; what is unpacked once should serve many of them."""
    return max(16, min(next_power_of_2(-(-num_pairs // num_experts)), 64))


def _launch_coded(x: Tensor, packed: PackedCodes, routing: Routing, is_spread: bool) -> Tensor:
    num_experts, num_pairs = routing.starts.shape[0] - 1, routing.pairs.shape[0]
    num_out = packed.num_out // num_experts
    out = x.new_empty(num_pairs, num_out)
    if num_pairs == 0:
        return out
    rows, tile = 64, pairs_a_tile(num_pairs, num_experts)
    pdl = has_pdl(x.device)
    _coded_expert_kernel[(triton.cdiv(num_out, rows), num_pairs // tile + num_experts)](
        x,
        *code_pointers(packed, x),
        routing.pairs,
        routing.starts,
        routing.weights,
        out,
        NUM_EXPERTS=num_experts,
        NUM_OUT=num_out,
        WIDTH=packed.width,
        ROW_BYTES=packed.codes.shape[1],
        **code_kind(packed),
        TOP_K=routing.top_k,
        IS_SPREAD=is_spread,
        NUM_STEPS=packed.codes.shape[1] // packed.group,
        ROWS=rows,
        TILE=tile,
        PDL=pdl,
        num_warps=4,
        num_stages=3,
        **pdl_options(pdl),
    )
    return out


def _launch_scaled(
    x: ScaledRows, weight: Tensor, scales: Tensor, routing: Routing, is_spread: bool, dtype: torch.dtype
) -> Tensor:
    num_experts, num_pairs = routing.starts.shape[0] - 1, routing.pairs.shape[0]
    num_out, width = weight.shape[0] // num_experts, weight.shape[1]
    out = torch.empty(num_pairs, num_out, dtype=dtype, device=weight.device)
    if num_pairs == 0:
        return out
    rows, tile = 64, pairs_a_tile(num_pairs, num_experts)
    pdl = has_pdl(weight.device)
    _scaled_expert_kernel[(triton.cdiv(num_out, rows), num_pairs // tile + num_experts)](
        x.values,
        x.scales,
        weight,
        scales,
        routing.pairs,
        routing.starts,
        routing.weights,
        out,
        NUM_EXPERTS=num_experts,
        NUM_OUT=num_out,
        WIDTH=width,
        TOP_K=routing.top_k,
        IS_SPREAD=is_spread,
        IS_INT8=weight.dtype == torch.int8,
        ROWS=rows,
        TILE=tile,
        STEP=256 if tile <= 32 else 128,
        PDL=pdl,
        num_warps=4,
        num_stages=4,
        **pdl_options(pdl),
    )
    return out


@triton.jit
def _store_pairs(
    out_ptr,
    acc,
    places,
    pairs,
    is_pair,
    rows,
    pair_weights_ptr,
    NUM_OUT: tl.constexpr,
    IS_SPREAD: tl.constexpr,
):
    """Write [rows, pairs] in sorted order, or times the pairs' weights at their own places."""
    targets = places.to(tl.int64)
    if IS_SPREAD:
        acc *= tl.load(pair_weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
        targets = pairs
    tl.store(
        out_ptr + targets[None, :] * NUM_OUT + rows[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows < NUM_OUT)[:, None] & is_pair[None, :],
    )


@triton.jit
def _coded_expert_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    table_ptr,
    pairs_ptr,
    starts_ptr,
    pair_weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
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
    TOP_K: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of one expert's codes times some of its pairs a program."""
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end = expert_tile(tile, starts_ptr, NUM_EXPERTS, TILE)
    if first >= end:
        return
    places = first + tl.arange(0, TILE)
    is_pair = places < end
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0)
    sources = places.to(tl.int64) if IS_SPREAD else pairs // TOP_K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_rows = expert * NUM_OUT + tl.minimum(rows, NUM_OUT - 1)
    is_row = rows >= 0
    place = codes_ptr + kept_rows.to(tl.int64)[:, None] * ROW_BYTES + tl.arange(0, GROUP)[None, :]
    acc = tl.zeros([ROWS, TILE], tl.float32)
    num_halves: tl.constexpr = 2 if IS_4BIT else 1
    is_padded: tl.constexpr = num_halves * NUM_STEPS * GROUP > WIDTH
    for step in tl.range(0, NUM_STEPS):
        codes = tl.load(place + step * GROUP)
        for half in tl.static_range(num_halves):
            if IS_4BIT:
                part = codes & 15 if half == 0 else codes >> 4
            else:
                part = codes
            acc = add_group(
                acc,
                part,
                kept_rows,
                is_row,
                sources,
                is_pair,
                num_halves * step + half,
                x_ptr,
                scales_ptr,
                zeros_ptr,
                offsets_ptr,
                table_ptr,
                NUM_EXPERTS * NUM_OUT,
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
    _store_pairs(out_ptr, acc, places, pairs, is_pair, rows, pair_weights_ptr, NUM_OUT, IS_SPREAD)


@triton.jit
def _scaled_expert_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    pairs_ptr,
    starts_ptr,
    pair_weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    IS_INT8: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of one expert's 8-bit weight times some of its pairs a program."""
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end = expert_tile(tile, starts_ptr, NUM_EXPERTS, TILE)
    if first >= end:
        return
    places = first + tl.arange(0, TILE)
    is_pair = places < end
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0)
    sources = places.to(tl.int64) if IS_SPREAD else pairs // TOP_K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_rows = expert * NUM_OUT + tl.minimum(rows, NUM_OUT - 1)
    columns = tl.arange(0, STEP)
    place = weight_ptr + kept_rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x_place = x_ptr + sources[None, :] * WIDTH + columns[:, None]
    acc = tl.zeros([ROWS, TILE], tl.int32 if IS_INT8 else tl.float32)
    for start in tl.range(0, WIDTH, STEP):
        if WIDTH % STEP:
            inside = start + columns < WIDTH
            weight = tl.load(place + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_place + start, mask=inside[:, None] & is_pair[None, :], other=0.0)
        else:
            weight = tl.load(place + start)
            x = tl.load(x_place + start, mask=is_pair[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, out_dtype=tl.int32 if IS_INT8 else tl.float32)
    out = acc.to(tl.float32) * tl.load(scales_ptr + kept_rows)[:, None]
    out *= tl.load(x_scales_ptr + sources, mask=is_pair, other=0.0)[None, :]
    _store_pairs(out_ptr, out, places, pairs, is_pair, rows, pair_weights_ptr, NUM_OUT, IS_SPREAD)
