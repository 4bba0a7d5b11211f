"""Logits changed by what has been said so far: repetition, presence and frequency penalties."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return ``logits`` with penalties for tokens that the row already holds.

    Repetition (Keskar et al. 2019) divides positive and multiplies negative logits of any token seen in prompt or
    output; presence and frequency are OpenAI's, over output tokens.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: [num_rows, max_len] integers, as columns of ``logits``; others than those are ignored, as are entries
            from ``num_tokens`` on.
        num_prompt_tokens: [num_rows] int64.
        num_tokens: [num_rows] int64, prompt and output.
        repetition: [num_rows] float32, 1 is none.
        presence: [num_rows] float32, 0 is none.
        frequency: [num_rows] float32, 0 is none.
    """
    num_rows, vocab = logits.shape
    index = torch.arange(token_ids.shape[1], device=logits.device)
    # Ignored entries are counted in a column of their own.
    token_ids = token_ids.long()
    is_known = (index < num_tokens[:, None]) & (token_ids >= 0) & (token_ids < vocab)
    known = torch.where(is_known, token_ids, vocab)
    spoken = torch.where(index >= num_prompt_tokens[:, None], known, vocab)
    ones = logits.new_ones(()).expand(known.shape)
    is_seen = logits.new_zeros(num_rows, vocab + 1).scatter_(1, known, ones)[:, :vocab] > 0
    counts = logits.new_zeros(num_rows, vocab + 1).scatter_add_(1, spoken, ones)[:, :vocab]
    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(is_seen, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
