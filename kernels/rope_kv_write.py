"""Rotary position embedding of q and k, and k and v written to the paged KV cache, in one pass.

The cache is block-major, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: all layers of a block are
contiguous, so that a block is copied as one piece. A slot is ``block * block_size + offset``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.native import MAX_HEAD_DIM, native_kernels

HEADS = 8
"""Heads a program turns."""
FLOAT8 = torch.float8_e4m3fn
MAX_FLOAT8 = 448.0
"""Larger numbers would become NaN; they are cut off."""

KVScales = tuple[float, float]
"""What an 8-bit cache's keys and values are multiplied by to get what they stand for."""
UNSCALED: KVScales = (1.0, 1.0)


def rope_kv_write_ref(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: KVScales = UNSCALED,
) -> Tensor:
    """Say in plain torch what ``rope_kv_write`` must do: float32 inside."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens = slots.shape[0]
    heads = qkv[:num_tokens].view(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    rotated = heads[:, : num_heads + num_kv_heads].float()
    if q_norm is not None and k_norm is not None:
        rotated = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + eps)
        weights = (q_norm.float().expand(num_heads, -1), k_norm.float().expand(num_kv_heads, -1))
        rotated = (rotated * torch.cat(weights)).to(qkv.dtype).float()
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    kv = torch.cat((rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]), dim=1)
    block, offset = slots // block_size, slots % block_size
    head = torch.arange(2 * num_kv_heads, device=slots.device)
    place = ((block * num_layers + layer) * (2 * num_kv_heads))[:, None] + head
    place = place * block_size + offset[:, None]
    if kv_cache.dtype == FLOAT8:
        scales = kv.new_tensor(kv_scales, dtype=torch.float32).repeat_interleave(num_kv_heads)[:, None]
        kv = (kv.float() / scales).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(FLOAT8).view(torch.uint8)
    else:
        kv = kv.to(kv_cache.dtype)
    rows = kv_cache.view(kv.dtype).view(-1, head_dim)
    rows.index_copy_(0, place.view(-1), kv.reshape(-1, head_dim))
    return rotated[:, :num_heads].contiguous()


def rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate q and k, write k and v to their slots of ``layer``, return q.

    Source: Su et al. 2021, arXiv:2104.09864, with the halves of a head as pairs (GPT-NeoX's order).

    Args:
        qkv: [at least num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; rows beyond are padding.
        positions: [num_tokens] int64.
        slots: [num_tokens] int64, distinct; a negative one is skipped on CUDA and not allowed elsewhere.
        cos_sin: [max_positions, head_dim] float32, cosines first.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        q_norm, k_norm: [head_dim]; RMSNorm over each head before the rotation, or None for models without.
        eps: of that norm.
        kv_scales: of keys and values, where the cache is in e4m3; what does not fit it is cut off.
        out: [num_tokens, num_heads, head_dim] in ``qkv``'s dtype, contiguous, to be returned; None: a new tensor.

    Returns:
        [num_tokens, num_heads, head_dim] in ``qkv``'s dtype.

    Raises:
        ValueError: shapes do not fit together; nothing was written.
    """
    num_tokens = slots.shape[0]
    _, num_layers, two, num_kv_heads, _, head_dim = kv_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if two != 2 or num_heads < 1 or qkv.shape[1] % head_dim or qkv.shape[0] < num_tokens:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit the cache {tuple(kv_cache.shape)} and {num_tokens} tokens"
        )
    if positions.shape != slots.shape or cos_sin.shape[1] != head_dim or (q_norm is None) != (k_norm is None):
        raise ValueError(
            f"positions {tuple(positions.shape)}, slots {tuple(slots.shape)}, cos_sin {tuple(cos_sin.shape)}"
        )
    if positions.dtype != torch.int64 or slots.dtype != torch.int64 or cos_sin.dtype != torch.float32:
        raise ValueError("positions and slots must be int64, cos_sin float32")
    if not (qkv.is_contiguous() and kv_cache.is_contiguous() and cos_sin.is_contiguous()):
        raise ValueError("qkv, kv_cache and cos_sin must be contiguous")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer {layer} of {num_layers}")
    if out is not None and (out.shape != (num_tokens, num_heads, head_dim) or not out.is_contiguous()):
        raise ValueError(f"out {tuple(out.shape)} is not {(num_tokens, num_heads, head_dim)}, contiguous")
    if qkv.device.type == "cuda":
        return _launch(qkv, positions, slots, cos_sin, kv_cache, layer, q_norm, k_norm, eps, kv_scales, out)
    q = _on_host(qkv, positions, slots, cos_sin, kv_cache, layer, q_norm, k_norm, eps, kv_scales)
    return q if out is None else out.copy_(q)


def _on_host(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: KVScales,
) -> Tensor:
    native = native_kernels() if qkv.dtype == kv_cache.dtype == torch.float32 else None
    if native is not None and kv_cache.shape[-1] <= MAX_HEAD_DIM:
        return native.rope_kv_write(qkv, positions, slots, cos_sin, kv_cache, layer, q_norm, k_norm, eps)
    return rope_kv_write_ref(qkv, positions, slots, cos_sin, kv_cache, layer, q_norm, k_norm, eps, kv_scales)


def _launch(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: KVScales,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens = slots.shape[0]
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_heads, head_dim) if out is None else out
    if num_tokens == 0:
        return q
    has_norm = q_norm is not None
    pdl = has_pdl(qkv.device)
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS))](
        qkv,
        positions,
        slots,
        cos_sin,
        kv_cache,
        q,
        q_norm if has_norm else qkv,
        k_norm if has_norm else qkv,
        eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        layer,
        num_layers,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF_PADDED=next_power_of_2(head_dim // 2),
        HEADS=HEADS,
        HAS_NORM=has_norm,
        MOST=MAX_FLOAT8 if kv_cache.dtype == FLOAT8 else 0.0,
        PDL=pdl,
        num_warps=2,
        **pdl_options(pdl),
    )
    return q


# What changes from layer to layer must not lead to a new variant.
@triton.jit(do_not_specialize=["k_inverse", "v_inverse", "layer", "num_layers"])
def _rope_kv_write_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    kv_cache_ptr,
    q_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_inverse,
    v_inverse,
    layer,
    num_layers,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one token a program; heads are held as their two halves."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_all: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HALF_PADDED)
    in_half = columns < half
    inside = (heads < num_all)[:, None] & in_half[None, :]
    # Positions and slots were there before the kernel that this one waits for began.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM
    cos = tl.load(angles + columns, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + half + columns, mask=in_half, other=0.0)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv_ptr + (token * num_all + heads)[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_q = (heads < NUM_HEADS)[:, None]
    is_turned = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    if HAS_NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        q_first = tl.load(q_norm_ptr + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm_ptr + half + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm_ptr + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm_ptr + half + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        normed_first = first * scale * tl.where(is_q, q_first, k_first)
        normed_second = second * scale * tl.where(is_q, q_second, k_second)
        normed_first = normed_first.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        normed_second = normed_second.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        first = tl.where(is_turned, normed_first, first)
        second = tl.where(is_turned, normed_second, second)
    turned_first = tl.where(is_turned, first * cos - second * sin, first)
    turned_second = tl.where(is_turned, second * cos + first * sin, second)
    place = q_ptr + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(place, turned_first.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    tl.store(place + half, turned_second.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    # heads - NUM_HEADS counts the heads of k, then those of v: the cache's own order.
    block = slot // BLOCK_SIZE
    row = (
        (block * num_layers + layer) * 2 * NUM_KV_HEADS + heads - NUM_HEADS
    ) * BLOCK_SIZE + slot % BLOCK_SIZE
    is_kept = inside & (heads >= NUM_HEADS)[:, None] & (slot >= 0)
    place = kv_cache_ptr + row[:, None] * HEAD_DIM + columns[None, :]
    if MOST > 0:
        inverse = tl.where(heads < NUM_HEADS + NUM_KV_HEADS, k_inverse, v_inverse)[:, None]
        turned_first = turned_first.to(qkv_ptr.dtype.element_ty).to(tl.float32) * inverse
        turned_second = turned_second.to(qkv_ptr.dtype.element_ty).to(tl.float32) * inverse
        turned_first = tl.minimum(tl.maximum(turned_first, -MOST), MOST)
        turned_second = tl.minimum(tl.maximum(turned_second, -MOST), MOST)
    tl.store(place, turned_first.to(kv_cache_ptr.dtype.element_ty), mask=is_kept)
    tl.store(place + half, turned_second.to(kv_cache_ptr.dtype.element_ty), mask=is_kept)
