"""Decode attention over a list of work: pieces of the rows' contexts, of about equal size, made on the host each step.

A CUDA graph's grid is fixed while contexts grow and come in all lengths. So the grid is as large as the device, each
program walks its share of the list, and the last piece of a row to finish merges that row's partial results: one
kernel, whatever the batch. ``workers.model.attention_work`` makes the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_scores import meeting_keys
from kernels.jit import (
    gdc_launch_dependents,
    gdc_wait,
    has_pdl,
    next_power_of_2,
    pdl_options,
    tl,
    triton,
)
from kernels.online_softmax import load_tile, take_in
from kernels.paged_decode_attention import paged_decode_attention_ref
from kernels.shared_prefix_attention import SharedWork, shared_prefix_attention

ITEM_FIELDS = 8
"""int32 fields of a piece: the token's index in the step, its row of the block tables, first token, end (of its last
tile, which may lie beyond the row's context), the slot of its partial result, the row's first slot, how many of its
slots this kernel fills, and how many it has in all."""
TILE = 32
"""Context tokens read at once; pieces begin at multiples of it."""
_MERGED_NUMBERS = 2048
"""Of partial results that a warp of the merge reads at once: 64 registers a thread."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The list and the memory for partial results; tensors are the caller's and may be longer than what is used."""

    items: Tensor
    """[max items, 8] int32."""
    shares: Tensor
    """[num_shares + 1] int32: where in the list each share begins; programs of a share walk its pieces in turn."""
    positions: Tensor
    """[max rows] int32: position of each token of the step; it attends to what stands there and before."""
    partial: Tensor
    """[max slots, num_heads, head_dim] float32."""
    lse: Tensor
    """[max slots, num_heads] float32, base 2."""
    counters: Tensor
    """[max rows * num_kv_heads] int32, zeros between launches."""


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """A step's decode attention: the rows' own pieces, and those of prefixes that rows share."""

    block_tables: Tensor
    """[rows, blocks] int32, of all places in the batch."""
    work: DecodeWork
    shared: SharedWork | None
    """None where no prefix is shared."""


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    attention: DecodeAttention,
    scale: float,
    out: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend from each token to its row's context, reading shared prefixes once for all rows; shapes as below."""
    work, shared, tables = attention.work, attention.shared, attention.block_tables
    if shared is not None:
        shared_prefix_attention(
            q,
            kv_cache,
            layer,
            tables,
            shared,
            scale,
            work.partial,
            work.lse,
            work.positions,
            window,
            soft_cap,
        )
    return decode_attention_over_work(q, kv_cache, layer, tables, work, scale, out, window, soft_cap)


def decode_attention_over_work(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: DecodeWork,
    scale: float,
    out: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend from each token of ``q`` that the list names to its row's context, as ``paged_decode_attention`` does.

    Source: FlashDecoding (Dao et al. 2023); the last arrival merges as in Stream-K (Osama et al. 2023).

    Args:
        q: [num_tokens, num_heads, head_dim], contiguous.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        block_tables: [rows, blocks] int32.
        work: the list of pieces; slots of a row are neighbours.
        scale: factor on the scores.
        out: as ``q``; rows that the list does not name are left as they are. None: a new tensor.
        window: how many of the last tokens count, 0 for all; pieces before them read nothing.
        soft_cap: bound on the scaled scores, 0 for none; see ``kernels.attention_scores``.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_heads, head_dim = q.shape[1:]
    _, num_layers, _, num_kv_heads, block_size, cache_head_dim = kv_cache.shape
    if head_dim != cache_head_dim or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(kv_cache.shape)}")
    if work.partial.shape[1:] != q.shape[1:] or work.items.shape[1] != ITEM_FIELDS:
        raise ValueError(f"partial results {tuple(work.partial.shape)} do not fit q {tuple(q.shape)}")
    if not (q.is_contiguous() and kv_cache.is_contiguous()) or block_tables.stride(-1) != 1:
        raise ValueError("q, kv_cache and the rows of block_tables must be contiguous")
    out = torch.empty_like(q) if out is None else out
    group = num_heads // num_kv_heads
    pdl = has_pdl(q.device)
    options = work_options(head_dim, q.element_size(), pdl, is_plain=not (window or soft_cap))
    _decode_work_kernel[((work.shares.shape[0] - 1) * num_kv_heads,)](
        q,
        kv_cache,
        block_tables,
        work.items,
        work.shares,
        work.positions,
        out,
        work.partial,
        work.lse,
        work.counters,
        scale * _LOG2_E,
        block_tables.stride(0),
        layer,
        num_layers,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        WINDOW=window,
        SOFT_CAP=soft_cap * _LOG2_E,
        PDL=pdl,
        **work_constants(head_dim, group, options["num_warps"]),
        **options,
        **pdl_options(pdl),
    )
    return out


def decode_attention_over_work_ref(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Say what pieces that cover ``lens`` tokens of ``rows`` add up to."""
    tables = block_tables[rows.long()]
    return paged_decode_attention_ref(q, kv_cache, layer, tables, lens, scale, window, soft_cap)


def work_constants(head_dim: int, group: int, num_warps: int) -> dict[str, int]:
    """How the kernel cuts its work for a head size and query heads a KV head: its constants by name."""
    head_padded, group_merged = next_power_of_2(head_dim), next_power_of_2(group)
    return {
        "GROUP": group,
        "GROUP_PADDED": max(16, group_merged),
        "HEAD_PADDED": head_padded,
        "TILE": TILE,
        "GROUP_MERGED": group_merged,
        "MERGE": max(_MERGED_NUMBERS * num_warps // (group_merged * head_padded), 1),
    }


def work_options(head_dim: int, element_size: int, is_hopper: bool, is_plain: bool = True) -> dict[str, int]:
    """Warps and tiles in flight. One warp needs no exchange with others; eight keep a multiprocessor busy.

    Measured on an H200, 1, 64 and 256 rows of 576 tokens: 9.0, 43, 151 us; four warps on 64 tokens take 13, 49, 159.
    Over e4m3, 64 and 256 rows: 34, 120 us; two warps 52, 175; in flight or not makes no difference.
    """
    if element_size == 4:
        return {"num_warps": 4, "num_stages": 1}
    if head_dim > 128 or not is_hopper:
        return {"num_warps": 4, "num_stages": 2}
    # With a window or a soft cap one warp has too few registers.
    return {"num_warps": 1 if is_plain else 2, "num_stages": 2}


# What changes from layer to layer must not lead to a new variant.
@triton.jit(do_not_specialize=["layer", "num_layers", "table_stride"])
def _decode_work_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    items_ptr,
    shares_ptr,
    token_positions_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    counters_ptr,
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
    GROUP_MERGED: tl.constexpr,
    MERGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head of one piece after the other; the query heads of the KV head are the rows of one product."""
    columns = tl.arange(0, HEAD_PADDED)
    group = tl.arange(0, GROUP_PADDED)
    in_head = columns < HEAD_DIM
    in_group = group < GROUP
    inside_q = in_group[:, None] & in_head[None, :]
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    share = tl.program_id(0) // NUM_KV_HEADS
    head = kv_head * GROUP + group
    # What the host tells a step was there before the kernel that this one waits for began.
    for index in range(tl.load(shares_ptr + share), tl.load(shares_ptr + share + 1)):
        item = items_ptr + index * 8
        token = tl.load(item).to(tl.int64)
        table = block_tables_ptr + tl.load(item + 1).to(tl.int64) * table_stride
        start = tl.load(item + 2)
        position = tl.load(token_positions_ptr + token)
        end = tl.minimum(tl.load(item + 3), position + 1)
        if WINDOW:
            first_seen = tl.maximum(position + 1 - WINDOW, 0)
            start = tl.maximum(start, first_seen // TILE * TILE)
        slot = tl.load(item + 4)
        num_slots = tl.load(item + 7)
        q_place = (token * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        q = meeting_keys(tl.load(q_ptr + q_place, mask=inside_q, other=0.0), kv_cache_ptr)
        highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        acc = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
        for tile in range(start, end, TILE):
            tokens = tile + tl.arange(0, TILE)
            inside = tokens < end
            keys, values = load_tile(
                kv_cache_ptr,
                table,
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
            seen = inside & (tokens >= first_seen) if WINDOW else inside
            highest, total, acc = take_in(
                q, keys, values, seen[None, :], scale_log2, highest, total, acc, False, SOFT_CAP
            )
        if WINDOW:
            # A piece before the window has read nothing: its weight is 2 ** -inf.
            total = tl.maximum(total, 1e-30)
        acc = acc / total[:, None]
        if num_slots == 1:
            tl.store(out_ptr + q_place, acc.to(out_ptr.dtype.element_ty), mask=inside_q)
        else:
            spot = slot.to(tl.int64) * NUM_KV_HEADS * GROUP + head
            tl.store(partial_ptr + spot[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside_q)
            tl.store(lse_ptr + spot, highest + tl.log2(total), mask=in_group)
            # All threads' stores come before the count, all loads of the last arrival after it.
            tl.debug_barrier()
            counter = counters_ptr + token * NUM_KV_HEADS + kv_head
            num_before = tl.atomic_add(counter, 1, sem="acq_rel")
            tl.debug_barrier()
            if num_before == tl.load(item + 6) - 1:
                merged = tl.arange(0, GROUP_MERGED)
                slots = tl.arange(0, MERGE)
                in_merged = merged < GROUP
                head_merged = kv_head * GROUP + merged
                highest_merged = tl.full([GROUP_MERGED], float("-inf"), tl.float32)
                total_merged = tl.zeros([GROUP_MERGED], tl.float32)
                acc_merged = tl.zeros([GROUP_MERGED, HEAD_PADDED], tl.float32)
                first = tl.load(item + 5)
                for other in range(0, num_slots, MERGE):
                    is_slot = other + slots < num_slots
                    places = (first + other + slots).to(tl.int64)[
                        :, None
                    ] * NUM_KV_HEADS * GROUP + head_merged[None, :]
                    is_merged = is_slot[:, None] & in_merged[None, :]
                    lse = tl.load(lse_ptr + places, mask=is_merged, other=float("-inf"), cache_modifier=".cg")
                    part = tl.load(
                        partial_ptr + places[:, :, None] * HEAD_DIM + columns[None, None, :],
                        mask=is_merged[:, :, None] & in_head[None, None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_top = tl.maximum(highest_merged, tl.max(lse, axis=0))
                    # Heads of padding have no finite score at all, nor have pieces before a window.
                    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
                    faded = tl.exp2(highest_merged - shift)
                    share_of = tl.exp2(lse - shift[None, :])
                    total_merged = total_merged * faded + tl.sum(share_of, axis=0)
                    acc_merged = acc_merged * faded[:, None] + tl.sum(part * share_of[:, :, None], axis=0)
                    highest_merged = new_top
                acc_merged = acc_merged / total_merged[:, None]
                out_place = (token * NUM_KV_HEADS * GROUP + head_merged)[:, None] * HEAD_DIM + columns[
                    None, :
                ]
                tl.store(
                    out_ptr + out_place,
                    acc_merged.to(out_ptr.dtype.element_ty),
                    mask=in_merged[:, None] & in_head[None, :],
                )
                tl.store(counter, 0)
    if PDL:
        # A program without pieces waits as well: a kernel's end says that all before it have ended.
        gdc_wait()
        gdc_launch_dependents()
