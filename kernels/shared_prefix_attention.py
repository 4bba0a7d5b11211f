"""Attention of many rows to a prefix that they share, read once for all of them instead of once a row.

The partial results join those of ``kernels.decode_attention_work`` over the rows' own tokens, which merges them.
Source: Hydragen (Juravsky et al. 2024), cascade inference (Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

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

SHARED_FIELDS = 8
"""int32 fields of a piece: first member, how many, a row of the block tables that holds the prefix, first token, end,
which of the rows' shared slots it fills; two unused."""
QUERIES = 128
"""Query heads of one KV head that a program holds: 32 rows where four heads share one."""
_TILE = 64
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SharedWork:
    """Pieces of shared prefixes; tensors are the caller's and may be longer than what is used."""

    items: Tensor
    """[max items, 8] int32."""
    num_items: Tensor
    """[1] int32."""
    members: Tensor
    """[max rows] int32: indices of tokens in the step, those of one group side by side."""
    first_slots: Tensor
    """[max rows] int32: by token, the first of its slots for shared pieces."""
    num_programs: int


def members_a_piece(group: int) -> int:
    """Rows that one program attends for, with ``group`` query heads a KV head."""
    return QUERIES // next_power_of_2(group)


def shared_prefix_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: SharedWork,
    scale: float,
    partial: Tensor,
    lse: Tensor,
    positions: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Fill the slots of shared pieces in ``partial`` and ``lse``.

    Args:
        q: [num_tokens, num_heads, head_dim], contiguous.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        block_tables: [rows, blocks] int32.
        work: the pieces, of at most ``members_a_piece`` rows each.
        scale: factor on the scores.
        partial: [max slots, num_heads, head_dim] float32.
        lse: [max slots, num_heads] float32, base 2.
        positions: [max rows] int32, of each token of the step.
        window: how many of the last tokens count, 0 for all.
        soft_cap: bound on the scaled scores, 0 for none; see ``kernels.attention_scores``.

    Raises:
        ValueError: shapes do not fit together.
    """
    _, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, cache_head_dim = kv_cache.shape
    if head_dim != cache_head_dim or num_heads % num_kv_heads or partial.shape[1:] != q.shape[1:]:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache or the partial results")
    if not (q.is_contiguous() and kv_cache.is_contiguous()) or block_tables.stride(-1) != 1:
        raise ValueError("q, kv_cache and the rows of block_tables must be contiguous")
    pdl = has_pdl(q.device)
    group = num_heads // num_kv_heads
    _shared_prefix_kernel[(work.num_programs,)](
        q,
        kv_cache,
        block_tables,
        work.items,
        work.num_items,
        work.members,
        work.first_slots,
        positions,
        partial,
        lse,
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
        **shared_constants(head_dim, group, q.element_size()),
        num_warps=8,
        num_stages=2 if q.element_size() == 2 else 1,
        **pdl_options(pdl),
    )


def shared_constants(head_dim: int, group: int, element_size: int) -> dict[str, int]:
    """How the kernel cuts its work: its constants by name."""
    return {
        "GROUP": group,
        "GROUP_PADDED": next_power_of_2(group),
        "HEAD_PADDED": next_power_of_2(head_dim),
        "QUERIES": QUERIES,
        "TILE": _TILE if head_dim <= 128 and element_size == 2 else 32,
    }


# What changes from layer to layer must not lead to a new variant.
@triton.jit(do_not_specialize=["layer", "num_layers", "table_stride"])
def _shared_prefix_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    items_ptr,
    num_items_ptr,
    members_ptr,
    first_slots_ptr,
    token_positions_ptr,
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
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head of one piece after the other: rows times query heads are the rows of one product."""
    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_DIM
    queries = tl.arange(0, QUERIES)
    num_work = tl.load(num_items_ptr) * NUM_KV_HEADS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        kv_head = work % NUM_KV_HEADS
        item = items_ptr + (work // NUM_KV_HEADS) * 8
        first_member = tl.load(item)
        is_query = (queries // GROUP_PADDED < tl.load(item + 1)) & (queries % GROUP_PADDED < GROUP)
        table = block_tables_ptr + tl.load(item + 2).to(tl.int64) * table_stride
        start = tl.load(item + 3)
        end = tl.load(item + 4)
        token = tl.load(members_ptr + first_member + queries // GROUP_PADDED, mask=is_query, other=0)
        head = kv_head * GROUP + queries % GROUP_PADDED
        q_place = (token.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + columns[None, :]
        inside_q = is_query[:, None] & in_head[None, :]
        q = meeting_keys(tl.load(q_ptr + q_place, mask=inside_q, other=0.0), kv_cache_ptr)
        if WINDOW:
            last = tl.load(token_positions_ptr + token, mask=is_query, other=2147483647)
            first_seen = last - (WINDOW - 1)
            start = tl.maximum(start, tl.min(first_seen, axis=0) // TILE * TILE)
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, HEAD_PADDED], tl.float32)
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
            seen = inside[None, :]
            if WINDOW:
                seen = seen & (tokens[None, :] >= first_seen[:, None])
            highest, total, acc = take_in(
                q, keys, values, seen, scale_log2, highest, total, acc, WINDOW > 0, SOFT_CAP
            )
        if WINDOW:
            total = tl.maximum(total, 1e-30)
        slot = tl.load(first_slots_ptr + token, mask=is_query, other=0) + tl.load(item + 5)
        spot = slot.to(tl.int64) * NUM_KV_HEADS * GROUP + head
        tl.store(
            partial_ptr + spot[:, None] * HEAD_DIM + columns[None, :], acc / total[:, None], mask=inside_q
        )
        tl.store(lse_ptr + spot, highest + tl.log2(total), mask=is_query)
