"""From logits to token ids: temperature, min-p, top-k, top-p, one draw a row. And log-probabilities.

The draw is a race, in two heats, of random numbers that depend on (seed, choice, position) alone: it needs no sort, and
gives the same token on every device but where two arrive at the same time up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.philox import Streams, exponentials

STRETCH = 256
"""Tokens that race together."""
STRETCH_RACE, TOKEN_RACE = 0, 1
"""Numbers of the two races."""


def sample(
    logits: Tensor,
    temperatures: Tensor,
    streams: Streams,
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
        streams: where each row's random numbers come from.
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
    return torch.where(is_greedy, logits.argmax(-1), _race(weights, streams))


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


def _race(weights: Tensor, streams: Streams) -> Tensor:
    """Draw one token id a row with probabilities proportional to ``weights``, by two exponential races.

    The least of ``e_i / w_i``, with independent exponential ``e_i``, is at ``i`` with probability ``w_i / sum(w)``
    (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). First stretches of the vocabulary race with the sums of their
    weights, then the tokens of the winner: that takes few random numbers, and whoever wins does so by a margin, so
    that logits which differ in their last bits hardly ever change a draw. Inverting the distribution with one number
    would move every later boundary.
    """
    num_rows, vocab = weights.shape
    num_stretches = -(-vocab // STRETCH)
    if num_stretches * STRETCH != vocab:
        weights = torch.nn.functional.pad(weights, (0, num_stretches * STRETCH - vocab))
    stretches = weights.view(num_rows, num_stretches, STRETCH)
    sums = stretches.sum(-1, dtype=torch.float64)
    heats, finals = exponentials(streams, (num_stretches, STRETCH))
    stretch = (heats / sums).argmin(-1)
    inside = stretches[torch.arange(num_rows, device=weights.device), stretch].double()
    token = (finals / inside).argmin(-1)
    return stretch * STRETCH + token
