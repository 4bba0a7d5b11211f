"""What some families do to attention's scores: a soft cap on their size, a window on how far back they look."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import tl, triton


def cap_and_mask_ref(
    scores: Tensor, positions: Tensor, tokens: Tensor, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Return ``scores`` [..., queries, tokens] capped, and minus infinity where a query may not look.

    Args:
        scores: float32, scaled.
        positions: [..., queries] of the queries: none looks ahead.
        tokens: [tokens], positions of the keys.
        window: a query sees itself and the ``window - 1`` tokens before it (Beltagy et al. 2020); 0 for all.
        soft_cap: ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv:2408.00118, section 2); 0 for none.
    """
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distances = positions[..., None] - tokens
    is_outside = distances < 0
    if window:
        is_outside = is_outside | (distances >= window)
    return scores.masked_fill(is_outside, float("-inf"))


@triton.jit
def soft_capped(scores, cap):
    """``cap * tanh(scores / cap)``; both in units of the base-2 exponent."""
    # tanh x = 1 - 2 / (e^2x + 1), and 2 log2(e) = 2.885; right at both infinities.
    return cap - 2.0 * cap / (tl.exp2(scores * (2.8853900817779268 / cap)) + 1.0)


@triton.jit
def meeting_keys(q, kv_cache_ptr):
    """``q`` in the type that keys and values are multiplied in: its own, but float16 for a cache of e4m3.

    One instruction makes two float16 of two e4m3, exactly; bfloat16 takes several. Queries beyond 65504 would not fit.
    """
    if kv_cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q
