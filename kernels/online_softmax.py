"""What all attention kernels in Triton do with a tile of a context: load it, weigh it, add it to what was seen before.

Functions of kernels, compiled into those that call them. ``kernels.prefill_attention_hopper`` is in another language.
"""

from __future__ import annotations

from kernels.attention_scores import soft_capped
from kernels.jit import tl, triton


@triton.jit
def load_tile(
    kv_cache_ptr,
    table,
    tokens,
    inside,
    layer,
    num_layers,
    kv_head,
    columns,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Keys and values of ``tokens`` that are ``inside``, by their blocks in ``table``; zeros elsewhere."""
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0)
    rows = ((blocks.to(tl.int64) * num_layers + layer) * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
    place = (rows + tokens % BLOCK_SIZE)[:, None] * HEAD_DIM + columns[None, :]
    is_there = inside[:, None] & (columns < HEAD_DIM)[None, :]
    keys = tl.load(kv_cache_ptr + place, mask=is_there, other=0.0)
    values = tl.load(kv_cache_ptr + place + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=is_there, other=0.0)
    return keys, values


@triton.jit
def soft_weights(scores, highest, MAY_SEE_NOTHING: tl.constexpr):
    """Online softmax in base 2 (Milakov & Gimelshein 2018).

    Returns the tile's weights, by how much what came before fades, and the new highest scores.
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # Before a query's window nothing is finite.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MAY_SEE_NOTHING else new_highest
    return tl.exp2(scores - shift[:, None]), tl.exp2(highest - shift), new_highest


@triton.jit
def take_in(
    q,
    keys,
    values,
    seen,
    scale_log2,
    highest,
    total,
    acc,
    MAY_SEE_NOTHING: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Attend to a tile: the new highest scores, sums of weights, and weighted values.

    ``seen`` says which tokens count, for each query or for all.
    """
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * scale_log2
    if SOFT_CAP > 0:
        scores = soft_capped(scores, SOFT_CAP)
    scores = tl.where(seen, scores, float("-inf"))
    weights, fade, highest = soft_weights(scores, highest, MAY_SEE_NOTHING)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def attend_tile(
    q,
    kv_cache_ptr,
    table,
    heads,
    stride,
    start,
    end,
    positions,
    highest,
    total,
    acc,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
):
    """Take in the tile of a paged context that begins at ``start``: the new highest scores, sums, weighted values.

    Tokens from ``end`` on are not there, those behind a query's position are not seen. Without ``IS_MASKED`` all are.
    """
    head_padded: tl.constexpr = acc.shape[1]
    columns = tl.arange(0, head_padded)
    in_head = columns < HEAD_DIM
    tokens = start + tl.arange(0, TILE)
    inside = tokens < end
    if IS_MASKED:
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
    rows = (blocks * stride + heads) * BLOCK_SIZE + tokens % BLOCK_SIZE
    place = kv_cache_ptr + rows[:, None] * HEAD_DIM + columns[None, :]
    values_place = place + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if IS_MASKED:
        keys = tl.load(place, mask=inside[:, None] & in_head[None, :], other=0.0)
    elif head_padded == HEAD_DIM:
        keys = tl.load(place)
    else:
        keys = tl.load(place, mask=in_head[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    if SOFT_CAP > 0 or IS_MASKED:
        scores *= scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores, SOFT_CAP)
        if IS_MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW:
                seen &= tokens[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        weights, fade, new_highest = soft_weights(scores, highest, MAY_SEE_NOTHING)
    else:
        # Scaled inside the exponent: one multiplication and addition in one instruction.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
    if IS_MASKED:
        values = tl.load(values_place, mask=inside[:, None] & in_head[None, :], other=0.0)
    elif head_padded == HEAD_DIM:
        values = tl.load(values_place)
    else:
        values = tl.load(values_place, mask=in_head[None, :], other=0.0)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new_highest, total, acc
