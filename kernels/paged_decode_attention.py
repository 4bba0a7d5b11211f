"""Attention of one query token a row over its paged context: the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_scores import cap_and_mask_ref, meeting_keys
from kernels.jit import tl, triton
from kernels.native import HEAD_DIM_STEP, MAX_BLOCK_SIZE, MAX_HEAD_DIM, native_kernels
from kernels.online_softmax import load_tile, take_in

TILE = 64
"""Tokens that a program reads at once."""
NUM_STAGES = 2
"""Tiles in flight. With these two no head size spills registers on sm_80 or sm_90, by Triton 3.6 or 3.7."""
SPLIT_TOKENS = 512
"""Context tokens a program walks: the boundaries depend on nothing but a row's own length."""
_LOG2_E = 1.4426950408889634


def paged_decode_attention_ref(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Say in plain torch what ``paged_decode_attention`` must return: float32 inside.

    Slots beyond a row's context get weight zero; they must hold finite numbers here.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    if num_rows == 0:
        return torch.empty_like(q)
    longest = int(context_lens.max())
    num_blocks = max(-(-longest // block_size), 1)
    # Gathered as [2, rows, kv heads, blocks] pieces of one head, so that the result is laid out for the products.
    blocks = block_tables[:, :num_blocks].long().mul(num_layers).add_(layer).mul_(2 * num_kv_heads)
    heads = torch.arange(2 * num_kv_heads, device=q.device).view(2, 1, num_kv_heads, 1)
    stored = kv_cache.view(torch.uint8) if kv_cache.itemsize == 1 else kv_cache
    pieces = torch.embedding(stored.view(-1, block_size * head_dim), blocks[:, None] + heads)
    keys, values = (
        pieces.view(kv_cache.dtype)
        .view(2, num_rows * num_kv_heads, num_blocks * block_size, head_dim)
        .float()
    )
    tokens = torch.arange(num_blocks * block_size, device=q.device)
    grouped = q.float().view(num_rows * num_kv_heads, num_heads // num_kv_heads, head_dim)
    if window or soft_cap:
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(scale).view(num_rows, -1, tokens.shape[0])
        # A row without context is zeroed below; until then it looks at its first slot.
        last = (context_lens - 1).clamp(min=0).long()[:, None]
        scores = cap_and_mask_ref(scores, last, tokens, window, soft_cap)
        scores = scores.view(num_rows * num_kv_heads, -1, tokens.shape[0])
    else:
        outside = tokens >= context_lens[:, None]
        bias = torch.zeros(outside.shape, device=q.device)
        bias.masked_fill_(outside, torch.finfo(torch.float32).min)
        bias = bias.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1)
        scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), values).view(num_rows, num_heads, head_dim)
    return out.masked_fill_((context_lens == 0).view(-1, 1, 1), 0.0).to(q.dtype)


def paged_decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend from one token a row to all tokens of that row's context.

    The context is split over programs whose partial results are merged by their log-sum-exp
    (FlashDecoding, Dao et al. 2023); the query heads of one KV head form the rows of one product.

    Args:
        q: [num_rows, num_heads, head_dim], contiguous.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        block_tables: [num_rows, at least blocks of the longest context] int32.
        context_lens: [num_rows] int32, the query's own token included; 0 gives a row of zeros.
        scale: factor on the scores, usually ``head_dim ** -0.5``.
        max_context_len: no less than any context length; sizes the grid.
        window: how many of the last tokens count, 0 for all.
        soft_cap: bound on the scaled scores, 0 for none; see ``kernels.attention_scores``.

    Returns:
        [num_rows, num_heads, head_dim] in ``q``'s dtype.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, cache_head_dim = kv_cache.shape
    if head_dim != cache_head_dim or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(kv_cache.shape)}")
    if block_tables.shape[0] != num_rows or context_lens.shape != (num_rows,):
        raise ValueError(
            f"{num_rows} rows, block tables {tuple(block_tables.shape)}, lengths {tuple(context_lens.shape)}"
        )
    if block_tables.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise ValueError(
            f"block tables are {block_tables.dtype}, lengths {context_lens.dtype}: int32 is needed"
        )
    if block_tables.shape[1] * block_size < max_context_len:
        raise ValueError(f"{block_tables.shape[1]} blocks a row cannot hold {max_context_len} tokens")
    if not (q.is_contiguous() and kv_cache.is_contiguous()) or block_tables.stride(-1) != 1:
        raise ValueError("q, kv_cache and the rows of block_tables must be contiguous")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of {num_layers}")
    if q.device.type == "cuda":
        return _launch(
            q, kv_cache, layer, block_tables, context_lens, scale, max_context_len, window, soft_cap
        )
    is_float32 = q.dtype == kv_cache.dtype == torch.float32
    is_fitting = head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM and block_size <= MAX_BLOCK_SIZE
    is_plain = not (window or soft_cap)
    native = native_kernels() if is_plain and is_float32 and is_fitting else None
    if native is not None:
        return native.paged_decode_attention(q, kv_cache, layer, block_tables, context_lens, scale)
    return paged_decode_attention_ref(q, kv_cache, layer, block_tables, context_lens, scale, window, soft_cap)


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    num_splits = max(triton.cdiv(max_context_len, SPLIT_TOKENS), 1)
    is_split = num_splits > 1
    partial = q.new_empty(
        (num_rows, num_heads, num_splits, head_dim) if is_split else (0,), dtype=torch.float32
    )
    lse = q.new_empty((num_rows, num_heads, num_splits) if is_split else (0,), dtype=torch.float32)
    head_padded = 1 << (head_dim - 1).bit_length()
    group = num_heads // num_kv_heads
    _paged_decode_attention_kernel[(num_rows, num_kv_heads, num_splits)](
        q,
        kv_cache,
        block_tables,
        context_lens,
        out,
        partial,
        lse,
        scale * _LOG2_E,
        block_tables.stride(0),
        layer,
        num_layers,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, 1 << (group - 1).bit_length()),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_PADDED=head_padded,
        TILE=TILE,
        SPLIT_TOKENS=SPLIT_TOKENS,
        IS_SPLIT=is_split,
        WINDOW=window,
        SOFT_CAP=soft_cap * _LOG2_E,
        num_warps=4,
        num_stages=NUM_STAGES if q.element_size() == 2 else 1,
    )
    if is_split:
        _merge_splits_kernel[(num_rows, num_heads)](
            partial,
            lse,
            context_lens,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            HEAD_PADDED=head_padded,
            SPLIT_TOKENS=SPLIT_TOKENS,
            WINDOW=window,
            num_warps=1,
        )
    return out


# What changes from step to step must not lead to a new variant, compiled while requests wait.
@triton.jit(do_not_specialize=["context_lens_ptr", "table_stride", "layer", "num_layers"])
def _paged_decode_attention_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    layer,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One KV head of one split of one row a program; online softmax in base 2 (Milakov & Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens_ptr + row)
    start = split * SPLIT_TOKENS
    end = tl.minimum(start + SPLIT_TOKENS, context)
    if split > 0 and start >= end:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(context - WINDOW, 0)
        if first >= end and context > 0:
            return
        start = tl.maximum(start, first // TILE * TILE)
    columns = tl.arange(0, HEAD_PADDED)
    group = tl.arange(0, GROUP_PADDED)
    in_head = columns < HEAD_DIM
    in_group = group < GROUP
    head = kv_head * GROUP + group
    q_place = (row * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
    q_inside = in_group[:, None] & in_head[None, :]
    q = meeting_keys(tl.load(q_ptr + q_place, mask=q_inside, other=0.0), kv_cache_ptr)

    highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    for tile in range(start, end, TILE):
        tokens = tile + tl.arange(0, TILE)
        inside = tokens < end
        keys, values = load_tile(
            kv_cache_ptr,
            block_tables_ptr + row * table_stride,
            tokens,
            inside,
            layer,
            num_layers,
            kv_head,
            columns,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
        )
        seen = inside & (tokens >= first) if WINDOW else inside
        highest, total, acc = take_in(
            q, keys, values, seen[None, :], scale_log2, highest, total, acc, False, SOFT_CAP
        )

    acc = acc / tl.maximum(total, 1e-30)[:, None]
    if IS_SPLIT:
        num_splits = tl.num_programs(2)
        slot = (row * NUM_KV_HEADS * GROUP + head) * num_splits + split
        tl.store(partial_ptr + slot[:, None] * HEAD_DIM + columns[None, :], acc, mask=q_inside)
        tl.store(lse_ptr + slot, highest + tl.log2(tl.maximum(total, 1e-30)), mask=in_group)
    else:
        tl.store(out_ptr + q_place, acc.to(out_ptr.dtype.element_ty), mask=q_inside)


@triton.jit(do_not_specialize=["context_lens_ptr", "num_splits"])
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    context_lens_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One head of one row a program: partial results weighted by their share of the softmax's sum."""
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    context = tl.load(context_lens_ptr + row)
    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    first_split = tl.maximum(context - WINDOW, 0) // SPLIT_TOKENS if WINDOW else 0
    for split in range(first_split, tl.cdiv(context, SPLIT_TOKENS)):
        slot = head * num_splits + split
        lse = tl.load(lse_ptr + slot)
        part = tl.load(partial_ptr + slot * HEAD_DIM + columns, mask=in_head, other=0.0)
        new_highest = tl.maximum(highest, lse)
        fade = tl.exp2(highest - new_highest)
        weight = tl.exp2(lse - new_highest)
        total = total * fade + weight
        acc = acc * fade + part * weight
        highest = new_highest
    out = acc / tl.maximum(total, 1e-30)
    tl.store(out_ptr + head * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=in_head)
