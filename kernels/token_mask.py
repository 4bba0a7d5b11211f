"""Forbid tokens in logits, by masks of a bit a token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import tl, triton

_BLOCK = 4096


def forbid_ref(logits: Tensor, allowed: Tensor) -> Tensor:
    """Say in plain torch what ``forbid`` leaves in ``logits``; [num_rows, vocab]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (allowed[:, :, None] >> shifts) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def forbid(logits: Tensor, allowed: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: [num_rows, vocab], contiguous, any floating type.
        allowed: [num_rows, at least vocab / 8] uint8, contiguous: token ``i`` is bit ``i % 8`` of byte ``i // 8``.

    Raises:
        ValueError: the masks are of other rows, too short or of another type, or something is not contiguous.
    """
    num_rows, vocab = logits.shape
    if allowed.dtype != torch.uint8 or allowed.shape[0] != num_rows or allowed.shape[1] * 8 < vocab:
        raise ValueError(
            f"masks of {tuple(allowed.shape)} {allowed.dtype} for {num_rows} rows of {vocab} tokens"
        )
    if not logits.is_contiguous() or not allowed.is_contiguous():
        raise ValueError("logits or masks are not contiguous")
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab, _BLOCK))
        _forbid_kernel[grid](logits, allowed, vocab, allowed.shape[1], BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _forbid_kernel(logits_ptr, allowed_ptr, vocab, num_bytes, BLOCK: tl.constexpr):
    """A block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < vocab
    packed = tl.load(allowed_ptr + row * num_bytes + columns // 8, mask=is_column, other=255).to(tl.int32)
    is_forbidden = (packed >> (columns % 8)) & 1 == 0
    tl.store(logits_ptr + row * vocab + columns, float("-inf"), mask=is_column & is_forbidden)
