"""Causal attention of few query tokens over long paged contexts, cut into pieces that fill a device.

``kernels.prefill_attention`` gives a program a tile of queries and a whole context: a prompt's last 16 tokens then
occupy one program a head. Here a program holds the queries of all heads that share a KV head, so that keys and values
are read once for them, and a piece of the context; a second kernel merges the pieces. ``workers.model.chunk_work``
makes the list of pieces on the host each step: a CUDA graph's grid is fixed while contexts come in all lengths.
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
from kernels.online_softmax import attend_tile
from kernels.prefill_attention import prefill_attention_ref
from kernels.rope_kv_write import FLOAT8

QUERY_ROWS = 64
"""Rows of the product that a program holds, tokens times query heads of a KV head: what a warpgroup's wgmma takes."""
TILE_FIELDS = 4
"""int32 fields of a tile of queries: its row of the block tables, the first query's place in ``q``, how many queries,
and the position of the first."""
ITEM_FIELDS = 8
"""int32 fields of a piece: its tile of queries, the row of the block tables, first token, end (of its last tile of
tokens, which may lie beyond what the queries see), the slot of its partial result; unused; unused; how many pieces its
tile of queries has."""
MERGE_FIELDS = 4
"""int32 fields of a token: the first slot of its tile of queries, how many, which query of the tile it is; unused."""
_MERGED_NUMBERS = 2048
"""Of partial results that a program of the merge reads at once: 64 registers a thread."""
MERGE_WARPS = 1
"""Of a program of the merge. With four, 16 tokens after 8000 in 16 pieces take 29.5 us a layer on an H200, with one
27.2."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """A step's queries in tiles and their contexts in pieces; tensors may be longer than what is used."""

    tiles: Tensor
    """[max tiles, 4] int32, contiguous: of at most ``queries_a_tile`` queries."""
    items: Tensor
    """[max items, 8] int32, contiguous; slots are below ``max items``, those of a tile side by side."""
    shares: Tensor
    """[num_shares + 1] int32: where in the list each share begins; programs of a share walk its pieces in turn."""
    merges: Tensor
    """[at least num_tokens, 4] int32, contiguous; tokens that no tile has, or whose tile is in one piece: at most 1
    slot."""


def queries_a_tile(group: int) -> int:
    """Query tokens that one program attends for, with ``group`` query heads a KV head; 0: they are too many."""
    return QUERY_ROWS // group


def can_attend(q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """True for what this kernel takes, with ``group`` query heads a KV head; where it is faster ``ChunkCut`` says.

    Measured on sm_90 alone: heads of 64, 128 and 256, one to eight a KV head, caches of 16 and of 8 bits.
    """
    is_16_bit = q_dtype in (torch.bfloat16, torch.float16) and cache_dtype in (q_dtype, FLOAT8)
    return is_16_bit and head_dim <= 256 and queries_a_tile(group) > 0


def chunk_attention_ref(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: ChunkWork,
    scale: float,
    out: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Say in plain torch what ``chunk_attention`` must do, tile by tile of queries."""
    used = work.items[: int(work.shares[-1]), 0].unique().long()
    for row, place, count, position in work.tiles[used].tolist():
        starts = torch.tensor([0, count], dtype=torch.int32)
        lens = torch.tensor([position + count], dtype=torch.int32)
        queries, table = q[place : place + count], block_tables[row : row + 1]
        out[place : place + count] = prefill_attention_ref(
            queries, kv_cache, layer, table, starts, lens, scale, window, soft_cap
        )
    return out


def chunk_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: ChunkWork,
    scale: float,
    out: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend from each query token that ``work`` names to its row's context up to and including itself.

    Source: FlashDecoding (Dao et al. 2023) with the query heads of a KV head as rows of one product.

    Args:
        q: [num_tokens, num_heads, head_dim], contiguous.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        block_tables: [rows, blocks] int32.
        work: the pieces.
        scale: factor on the scores, usually ``head_dim ** -0.5``.
        out: as ``q``; tokens that ``work`` does not name are left as they are. None: a new tensor.
        window: a query sees itself and the ``window - 1`` tokens before it, 0 for all.
        soft_cap: bound on the scaled scores, 0 for none; see ``kernels.attention_scores``.

    Returns:
        [num_tokens, num_heads, head_dim] in ``q``'s dtype.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, _, cache_head_dim = kv_cache.shape
    if head_dim != cache_head_dim or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(kv_cache.shape)}")
    if not queries_a_tile(num_heads // num_kv_heads):
        raise ValueError(f"{num_heads // num_kv_heads} query heads a KV head: at most {QUERY_ROWS} are held")
    if work.tiles.shape[1] != TILE_FIELDS or work.items.shape[1] != ITEM_FIELDS:
        raise ValueError(f"tiles {tuple(work.tiles.shape)}, pieces {tuple(work.items.shape)}")
    if work.merges.shape[0] < num_tokens or work.merges.shape[1] != MERGE_FIELDS:
        raise ValueError(f"{num_tokens} tokens, merges {tuple(work.merges.shape)}")
    told = (block_tables, work.tiles, work.items, work.shares, work.merges)
    if any(one.dtype != torch.int32 for one in told):
        raise ValueError("block_tables and the tensors of work must be int32")
    if not (q.is_contiguous() and kv_cache.is_contiguous()) or block_tables.stride(-1) != 1:
        raise ValueError("q, kv_cache and the rows of block_tables must be contiguous")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of {num_layers}")
    out = torch.empty_like(q) if out is None else out
    run = _launch if q.device.type == "cuda" else chunk_attention_ref
    return run(q, kv_cache, layer, block_tables, work, scale, out, window, soft_cap)


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """How the kernel works: rows of its product, context tokens a step of the loop, warps, pipeline stages."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def chunk_tiles(head_dim: int, element_size: int, is_hopper: bool) -> ChunkTiles:
    """Choose tiles that keep the accumulator in registers and two programs on a multiprocessor."""
    if element_size == 4:
        return ChunkTiles(QUERY_ROWS, tokens=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return ChunkTiles(QUERY_ROWS, tokens=32, num_warps=8, num_stages=2)
    # With four warps registers spill on sm_80.
    return ChunkTiles(QUERY_ROWS, tokens=64, num_warps=4 if is_hopper else 8, num_stages=3)


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    work: ChunkWork,
    scale: float,
    out: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    tiles: ChunkTiles | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    tiles = chunk_tiles(head_dim, q.element_size(), has_pdl(q.device)) if tiles is None else tiles
    num_slots, num_shares = work.items.shape[0], work.shares.shape[0] - 1
    partial = q.new_empty(num_slots, num_kv_heads, tiles.rows, head_dim, dtype=torch.float32)
    lse = q.new_empty(num_slots, num_kv_heads, tiles.rows, dtype=torch.float32)
    pdl, group = has_pdl(q.device), num_heads // num_kv_heads
    _chunk_attention_kernel[(num_shares * num_kv_heads,)](
        q,
        kv_cache,
        block_tables,
        work.tiles,
        work.items,
        work.shares,
        out,
        partial,
        lse,
        scale * _LOG2_E,
        block_tables.stride(0),
        layer,
        num_layers,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_PADDED=next_power_of_2(head_dim),
        ROWS=tiles.rows,
        TILE=tiles.tokens,
        WINDOW=window,
        SOFT_CAP=soft_cap * _LOG2_E,
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(pdl),
    )
    _merge_pieces_kernel[(num_tokens, num_heads)](
        partial,
        lse,
        work.merges,
        out,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=tiles.rows,
        PDL=pdl,
        **merge_constants(head_dim),
        num_warps=MERGE_WARPS,
        **pdl_options(pdl),
    )
    return out


def merge_constants(head_dim: int) -> dict[str, int]:
    """How the merge works for a head size: its constants by name."""
    head_padded = next_power_of_2(head_dim)
    return {"HEAD_PADDED": head_padded, "MERGE": max(_MERGED_NUMBERS // head_padded, 1)}


# What changes from step to step must not lead to a new variant, compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride", "layer", "num_layers"])
def _chunk_attention_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    tiles_ptr,
    items_ptr,
    shares_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    layer,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head of one piece after the other; online softmax in base 2."""
    columns = tl.arange(0, HEAD_PADDED)
    rows = tl.arange(0, ROWS)
    queries = rows // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    share = tl.program_id(0) // NUM_KV_HEADS
    head = kv_head * GROUP + rows % GROUP
    heads = layer * 2 * NUM_KV_HEADS + kv_head
    stride = num_layers * 2 * NUM_KV_HEADS
    # What the host tells a step was there before the kernel that this one waits for began.
    first_item = tl.load(shares_ptr + share)
    end_item = tl.load(shares_ptr + share + 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for index in range(first_item, end_item):
        item = items_ptr + index * 8
        tile = tiles_ptr + tl.load(item) * 4
        table = block_tables_ptr + tl.load(item + 1).to(tl.int64) * table_stride
        place = tl.load(tile + 1)
        count = tl.load(tile + 2)
        position = tl.load(tile + 3)
        start = tl.load(item + 2)
        end = tl.minimum(tl.load(item + 3), position + count)
        q_place = ((place + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head)[
            :, None
        ] * HEAD_DIM + columns[None, :]
        is_query = queries < count
        q_inside = is_query[:, None] & (columns < HEAD_DIM)[None, :]
        q = meeting_keys(tl.load(q_ptr + q_place, mask=q_inside, other=0.0), kv_cache_ptr)
        positions = position + queries
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        whole_end = start
        if WINDOW:
            first_seen = position + 1 - WINDOW
            start += tl.maximum(first_seen - start, 0) // TILE * TILE
            whole_end = start
        else:
            # Tiles that every query sees whole come first and need no mask.
            whole_end += tl.maximum(tl.minimum(end, position + 1) - start, 0) // TILE * TILE
            for token in range(start, whole_end, TILE):
                # fmt: off
                highest, total, acc = attend_tile(
                    q, kv_cache_ptr, table, heads, stride, token, end, positions, highest, total, acc, scale_log2,
                    NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, 0, SOFT_CAP, False, False,
                )
                # fmt: on
        for token in range(whole_end, end, TILE):
            # fmt: off
            highest, total, acc = attend_tile(
                q, kv_cache_ptr, table, heads, stride, token, end, positions, highest, total, acc, scale_log2,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, SOFT_CAP, True, True,
            )
            # fmt: on
        # A piece that a query sees nothing of has no weight: 2 ** -inf.
        total = tl.maximum(total, 1e-30)
        acc = acc / total[:, None]
        if tl.load(item + 7) == 1:
            tl.store(out_ptr + q_place, acc.to(out_ptr.dtype.element_ty), mask=q_inside)
        else:
            spot = (tl.load(item + 4).to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + rows
            tl.store(partial_ptr + spot[:, None] * HEAD_DIM + columns[None, :], acc, mask=q_inside)
            tl.store(lse_ptr + spot, highest + tl.log2(total), mask=is_query)


@triton.jit
def _merge_pieces_kernel(
    partial_ptr,
    lse_ptr,
    merges_ptr,
    out_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one token a program: pieces weighted by their share of the softmax's sum."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # The kernel before this one has waited: what was told before it began is there.
    first = tl.load(merges_ptr + token * 4)
    count = tl.load(merges_ptr + token * 4 + 1)
    query = tl.load(merges_ptr + token * 4 + 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if count > 1:
        columns = tl.arange(0, HEAD_PADDED)
        slots = tl.arange(0, MERGE)
        in_head = columns < HEAD_DIM
        highest = float("-inf")
        total = 0.0
        acc = tl.zeros([HEAD_PADDED], tl.float32)
        for other in range(0, count, MERGE):
            slot = (first + other + slots).to(tl.int64)
            places = (slot * NUM_KV_HEADS + head // GROUP) * ROWS + query * GROUP + head % GROUP
            inside = other + slots < count
            lse = tl.load(lse_ptr + places, mask=inside, other=float("-inf"))
            part = tl.load(
                partial_ptr + places[:, None] * HEAD_DIM + columns[None, :],
                mask=inside[:, None] & in_head[None, :],
                other=0.0,
            )
            # Pieces that the query sees nothing of have no finite score, with a window maybe all the first ones.
            new_highest = tl.maximum(highest, tl.max(lse))
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            fade = tl.exp2(highest - shift)
            weights = tl.exp2(lse - shift)
            total = total * fade + tl.sum(weights)
            acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
            highest = new_highest
        place = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + columns
        tl.store(out_ptr + place, (acc / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty), mask=in_head)
