"""Causal attention of many query tokens a row over its paged context: prompts, chunks and prefix hits alike.

A row's queries are the last tokens of its context. What lies before them, computed by an earlier step or found
in the prefix cache, is read through the block table like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_scores import cap_and_mask_ref, meeting_keys
from kernels.jit import has_pdl, tl, triton
from kernels.online_softmax import attend_tile
from kernels.prefill_attention_hopper import QueryTiles, can_attend, prefill_attention_hopper

_LOG2_E = 1.4426950408889634


def prefill_attention_ref(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Say in plain torch what ``prefill_attention`` must return: float32 inside, row by row."""
    num_heads, head_dim = q.shape[1:]
    _, _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    stored = kv_cache.view(torch.uint8) if kv_cache.itemsize == 1 else kv_cache
    starts = query_starts.tolist()
    for row, context in enumerate(context_lens.tolist()):
        queries = slice(starts[row], starts[row + 1])
        num_queries = queries.stop - queries.start
        if num_queries == 0:
            continue
        blocks = block_tables[row, : -(-context // block_size)].long()
        held = stored[:, layer].index_select(0, blocks).view(kv_cache.dtype).permute(1, 2, 0, 3, 4)
        held = held.float().reshape(2, num_kv_heads, 1, -1, head_dim)[:, :, :, :context]
        keys, values = held.expand(2, num_kv_heads, group, context, head_dim)
        grouped = q[queries].float().view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        if window or soft_cap:
            tokens = torch.arange(context, device=q.device)
            scores = grouped @ keys.transpose(-1, -2) * scale
            scores = cap_and_mask_ref(scores, tokens[context - num_queries :], tokens, window, soft_cap)
            attended = scores.softmax(-1) @ values
            out[queries] = attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
            continue
        mask = None
        if num_queries < context:
            mask = torch.ones(num_queries, context, dtype=torch.bool, device=q.device).tril_(
                context - num_queries
            )
        attended = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        out[queries] = attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
    return out


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    tiles: QueryTiles | None = None,
) -> Tensor:
    """Attend from each query token to its row's context up to and including itself.

    Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691) over a block table.

    Args:
        q: [num_tokens, num_heads, head_dim], contiguous; the rows' queries one after the other.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        block_tables: [num_rows, at least blocks of the longest context] int32.
        query_starts: [num_rows + 1] int32: where each row's queries begin, then where the last one's end.
        context_lens: [num_rows] int32: tokens of the row, its queries included.
        scale: factor on the scores, usually ``head_dim ** -0.5``.
        out: as ``q``, on CUDA only; tokens of no row are left as they are. None: a new tensor.
        window: a query sees itself and the ``window - 1`` tokens before it, 0 for all.
        soft_cap: bound on the scaled scores, 0 for none; see ``kernels.attention_scores``.
        tiles: all queries, cut for ``kernels.prefill_attention_hopper``, which is taken where it can be; None:
            never.

    Returns:
        [num_tokens, num_heads, head_dim] in ``q``'s dtype.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_heads, head_dim = q.shape[1:]
    _, num_layers, _, num_kv_heads, _, cache_head_dim = kv_cache.shape
    num_rows = context_lens.shape[0]
    if head_dim != cache_head_dim or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit the cache {tuple(kv_cache.shape)}")
    if block_tables.shape[0] != num_rows or query_starts.shape != (num_rows + 1,):
        raise ValueError(
            f"{num_rows} rows, block tables {tuple(block_tables.shape)}, starts {tuple(query_starts.shape)}"
        )
    if not block_tables.dtype == query_starts.dtype == context_lens.dtype == torch.int32:
        raise ValueError("block_tables, query_starts and context_lens must be int32")
    if not (q.is_contiguous() and kv_cache.is_contiguous()) or block_tables.stride(-1) != 1:
        raise ValueError("q, kv_cache and the rows of block_tables must be contiguous")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of {num_layers}")
    if tiles is not None and can_attend(q, kv_cache, window, soft_cap):
        out = torch.empty_like(q) if out is None else out
        prefill_attention_hopper(q, kv_cache, layer, block_tables, tiles, scale, out)
        return out
    if q.device.type == "cuda":
        return _launch(
            q, kv_cache, layer, block_tables, query_starts, context_lens, scale, out, window, soft_cap
        )
    return prefill_attention_ref(
        q, kv_cache, layer, block_tables, query_starts, context_lens, scale, window, soft_cap
    )


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_rows = context_lens.shape[0]
    out = torch.empty_like(q) if out is None else out
    if num_tokens == 0:
        return out
    tiles = prefill_tiles(head_dim, q.element_size(), has_pdl(q.device), window > 0)
    # A row of n queries has at most n // tile + 1 tiles, so this many suffice whatever the rows' lengths.
    num_tiles = num_tokens // tiles.queries + num_rows
    _prefill_attention_kernel[(num_tiles, num_heads)](
        q,
        kv_cache,
        block_tables,
        query_starts,
        context_lens,
        out,
        scale * _LOG2_E,
        block_tables.stride(0),
        num_rows,
        layer,
        num_layers,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_PADDED=1 << (head_dim - 1).bit_length(),
        QUERIES=tiles.queries,
        TILE=tiles.tokens,
        WINDOW=window,
        SOFT_CAP=soft_cap * _LOG2_E,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the kernel cuts its work: query and context tokens a tile, warps, pipeline stages."""

    queries: int
    tokens: int
    num_warps: int
    num_stages: int


def prefill_tiles(
    head_dim: int, element_size: int, is_hopper: bool, is_windowed: bool = False
) -> PrefillTiles:
    """Choose tiles that keep the accumulator in registers; 64 query rows a warpgroup get wgmma on sm_90.

    Measured on an H200 at 2048, 8000 and 32 x 512 tokens: 133, 1423, 337 us; twice the rows and warps: 147, 1494, 390.
    """
    if element_size == 4:
        return PrefillTiles(queries=32, tokens=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return PrefillTiles(queries=64, tokens=32, num_warps=8, num_stages=2)
    if is_hopper:
        return PrefillTiles(queries=64, tokens=64, num_warps=4, num_stages=2)
    if is_windowed:
        # A third loop over tiles: with larger ones registers spill on sm_80.
        return PrefillTiles(queries=64, tokens=32, num_warps=4, num_stages=2)
    return PrefillTiles(queries=128, tokens=64, num_warps=8, num_stages=2)


# What changes from step to step must not lead to a new variant, compiled while requests wait.
@triton.jit(do_not_specialize=["context_lens_ptr", "table_stride", "num_rows", "layer", "num_layers"])
def _prefill_attention_kernel(
    q_ptr,
    kv_cache_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,
    scale_log2,
    table_stride,
    num_rows,
    layer,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One tile of queries of one head a program; online softmax in base 2."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    # Row r owns tiles from query_starts[r] // QUERIES + r on: find the last row that starts no later than this tile.
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    if row < 0:
        return
    row_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - row_start
    first_query = (tile - (row_start // QUERIES + row)) * QUERIES
    if first_query >= num_queries:
        return
    context = tl.load(context_lens_ptr + row)
    num_before = context - num_queries

    columns = tl.arange(0, HEAD_PADDED)
    in_head = columns < HEAD_DIM
    queries = first_query + tl.arange(0, QUERIES)
    q_place = ((row_start + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head)[
        :, None
    ] * HEAD_DIM + columns[None, :]
    q_inside = (queries < num_queries)[:, None] & in_head[None, :]
    q = meeting_keys(tl.load(q_ptr + q_place, mask=q_inside, other=0.0), kv_cache_ptr)
    positions = num_before + queries

    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_PADDED], tl.float32)
    table = block_tables_ptr + tl.cast(row, tl.int64) * table_stride
    heads = layer * 2 * NUM_KV_HEADS + head // GROUP
    stride = num_layers * 2 * NUM_KV_HEADS
    # Tiles that every query of this tile sees whole stand in the middle and need no mask.
    end = tl.minimum(num_before + first_query + QUERIES, context)
    whole_end = (num_before + first_query + 1) // TILE * TILE
    whole = 0
    if WINDOW:
        begin = tl.maximum(num_before + first_query + 1 - WINDOW, 0) // TILE * TILE
        last = tl.minimum(num_before + first_query + QUERIES, context) - 1
        whole = tl.cdiv(tl.maximum(last + 1 - WINDOW, 0), TILE) * TILE
        for start in range(begin, tl.minimum(whole, end), TILE):
            # fmt: off
            highest, total, acc = attend_tile(
                q, kv_cache_ptr, table, heads, stride, start, end, positions, highest, total, acc, scale_log2,
                NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, SOFT_CAP, True, WINDOW > 0,
            )
            # fmt: on
    for start in range(whole, whole_end, TILE):
        # fmt: off
        highest, total, acc = attend_tile(
            q, kv_cache_ptr, table, heads, stride, start, end, positions, highest, total, acc, scale_log2,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, 0, SOFT_CAP, False, False,
        )
        # fmt: on
    for start in range(tl.maximum(whole, whole_end), end, TILE):
        # fmt: off
        highest, total, acc = attend_tile(
            q, kv_cache_ptr, table, heads, stride, start, end, positions, highest, total, acc, scale_log2,
            NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, SOFT_CAP, True, WINDOW > 0,
        )
        # fmt: on
    acc = acc / total[:, None]
    tl.store(out_ptr + q_place, acc.to(out_ptr.dtype.element_ty), mask=q_inside)
