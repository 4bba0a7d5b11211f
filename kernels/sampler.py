"""From logits to token ids: temperature, min-p, top-k, top-p, one draw a row. And log-probabilities.

The draw inverts the distribution in vocabulary order with one uniform number a row, so that it needs no sort
and the same number gives the same token on every device but where it falls within rounding of a boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 256
"""Tokens summed at once when the draw is located."""


def sample(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    max_top_k: int = 0,
) -> Tensor:
    """Draw one token id a row; [num_rows] int64.

    Filters apply in this order, each to the distribution that the last one left: temperature, min-p, top-k, top-p.
    Tokens that tie with the last one kept are kept.

    Args:
        logits: [num_rows, vocab] float32; minus infinity is never drawn.
        temperatures: [num_rows] float32; 0 takes the likeliest token.
        uniforms: [num_rows] float64 in [0, 1).
        top_k: [num_rows] int64, 0 is off; None if off for all rows.
        top_p: [num_rows] float32, 1 is off; None if off for all rows.
        min_p: [num_rows] float32, 0 is off; None if off for all rows.
        max_top_k: the largest value in ``top_k``; known to the caller, so that nothing waits for a device.
    """
    is_greedy = temperatures == 0
    # The highest logit becomes 0 first: divided by a tiny temperature it would be infinite.
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= torch.where(is_greedy, 1.0, temperatures)[:, None]
    if min_p is not None:
        scaled.masked_fill_(scaled < min_p.log()[:, None], float("-inf"))
    if top_k is not None and max_top_k > 0:
        kth = (top_k - 1).clamp(min=0, max=scaled.shape[1] - 1)
        likeliest = scaled.topk(min(max_top_k, scaled.shape[1]), dim=-1).values
        floor = likeliest.gather(1, kth[:, None])
        scaled.masked_fill_((scaled < floor) & (top_k > 0)[:, None], float("-inf"))
    weights = scaled.exp_()
    if top_p is not None:
        weights = _keep_nucleus(weights, top_p)
    return torch.where(is_greedy, logits.argmax(-1), _locate(weights, uniforms))


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each row's token, and its ``num_top`` likeliest ids with theirs, descending.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: [num_rows] int64.
        num_top: may be 0.
    """
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, token_ids[:, None]).squeeze(1), top.indices, top.values


def _keep_nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the fewest likeliest tokens that hold ``top_p`` of each row's mass (Holtzman et al. 2020)."""
    total = weights.sum(-1, dtype=torch.float64)
    wanted = total * top_p.double()
    if weights.device.type == "cpu":
        # Tokens below this weight hold less than what the nucleus may leave out, all of them together.
        least = (total - wanted) / weights.shape[1]
        floor = torch.zeros_like(top_p)
        for row in (top_p < 1.0).nonzero().flatten().tolist():
            candidates = weights[row][weights[row] >= least[row]].sort(descending=True).values
            floor[row] = _nucleus_floor(candidates[None], wanted[row : row + 1])
    else:
        # Counting candidates would wait for the device.
        floor = _nucleus_floor(weights.sort(dim=-1, descending=True).values, wanted)
        floor = torch.where(top_p < 1.0, floor, 0.0)
    return weights.masked_fill(weights < floor[:, None], 0.0)


def _nucleus_floor(descending: Tensor, wanted: Tensor) -> Tensor:
    """Smallest weight kept of each row, so that the kept ones reach ``wanted``."""
    before = descending.cumsum(-1, dtype=torch.float64) - descending
    last = ((before < wanted[:, None]).sum(-1, keepdim=True) - 1).clamp(min=0)
    return descending.gather(1, last).squeeze(1)


def _locate(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First token id at which the running sum of ``weights`` passes ``uniforms`` of the total."""
    num_rows, vocab = weights.shape
    padded = -(-vocab // _CHUNK) * _CHUNK
    if padded != vocab:
        weights = torch.nn.functional.pad(weights, (0, padded - vocab))
    chunks = weights.view(num_rows, -1, _CHUNK)
    sums = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniforms * sums[:, -1])[:, None]
    # The first chunk whose running sum passes the target holds a positive weight, as does the token within.
    chunk = (sums <= target).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK)).squeeze(1)
    running = before + inside.cumsum(-1, dtype=torch.float64)
    token = (running <= target).sum(-1, keepdim=True)
    # Rounding may leave the target at the very end of the chunk: take its last token with any weight.
    last = _CHUNK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(token, last)).squeeze(1)
