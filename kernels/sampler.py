"""From logits to token ids: temperature, min-p, top-k, top-p, one draw a row. And log-probabilities.

The draw is a race, in two heats, of random numbers that depend on (seed, choice, position) alone: it needs no sort, and
gives the same token on every device but where two arrive at the same time up to rounding. Ranks that share a vocabulary
let their own columns race and tell each other who came first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.filters import Filters, filter_floors
from kernels.log_sum_exp import log_sum_exp
from kernels.philox import Streams, exponentials
from kernels.top_tokens import top_tokens
from kernels.vocab_shard import STRETCH, VocabShard, WholeVocab

STRETCH_RACE, TOKEN_RACE = 0, 1
"""Numbers of the two races."""
NO_TOKEN = -1
"""Of a row whose logits are not numbers: NaN or infinity among them, or all of them minus infinity."""


def sample(
    logits: Tensor,
    temperatures: Tensor,
    streams: Streams,
    filters: Filters | None = None,
    vocab: VocabShard | None = None,
    filtered: Tensor | None = None,
) -> Tensor:
    """Draw one token id a row; [num_rows] int64.

    Temperature comes before the filters, which see the distribution that it makes.

    Args:
        logits: [num_rows, vocab] float32; minus infinity is never drawn. Of a row with NaN or infinity, or with nothing
            but minus infinity, nothing is: it gets ``NO_TOKEN``.
        temperatures: [num_rows] float32; 0 takes the likeliest token.
        streams: where each row's random numbers come from.
        filters: one of each a filtered row; None if all are off for all rows.
        vocab: which tokens ``logits`` are of; None: all.
        filtered: [num_filtered] int64, the rows that ``filters`` are of; None: all.
    """
    vocab = vocab or WholeVocab(logits.shape[1])
    is_greedy = temperatures == 0
    # The highest logit becomes 0 first: divided by a tiny temperature it would be infinite.
    best, at = logits.max(-1)
    scaled = logits - vocab.highest(best)[:, None]
    scaled /= torch.where(is_greedy, 1.0, temperatures)[:, None]
    if filters is not None:
        # What they keep depends on all words: these rows, and no others, are told whole.
        some = logits if filtered is None else logits[filtered]
        floors = filter_floors(
            vocab.whole(some), temperatures if filtered is None else temperatures[filtered], filters
        )
        if filtered is None:
            scaled.masked_fill_(logits < floors[:, None], float("-inf"))
        else:
            scaled[filtered] = scaled[filtered].masked_fill_(some < floors[:, None], float("-inf"))
    weights = scaled.exp_()
    scores, tokens = _race(weights, streams, vocab)
    scores = torch.where(is_greedy, -best.double(), scores)
    return _winner(scores, torch.where(is_greedy, at, tokens), vocab)


def likeliest(logits: Tensor, vocab: VocabShard | None = None) -> Tensor:
    """Return the token of each row's highest logit, or ``NO_TOKEN`` as ``sample`` does; [num_rows] int64."""
    vocab = vocab or WholeVocab(logits.shape[1])
    best, at = logits.max(-1)
    return _winner(-best.double(), at, vocab)


def log_probabilities(
    logits: Tensor, token_ids: Tensor, num_top: int, vocab: VocabShard | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's token's log-probability, the ``num_top`` likeliest ids with theirs, descending, and its rank.

    A token's rank is 1 more than the number of likelier ones.

    Args:
        logits: [num_rows, vocab] float32.
        token_ids: [num_rows] int64.
        num_top: may be 0.
        vocab: which tokens ``logits`` are of; None: all.
    """
    vocab = vocab or WholeVocab(logits.shape[1])
    num_rows, own = logits.shape[0], vocab.own
    local = token_ids - own.start
    is_own = (local >= 0) & (local < len(own))
    told = logits.gather(1, torch.where(is_own, local, 0)[:, None])
    told = torch.where(is_own[:, None], told, float("-inf"))
    values, ids = _top(logits, num_top)
    # One message: this rank's mass, the token's logit, the candidates. All are exact in float64.
    columns = [log_sum_exp(logits)[:, None], told, values, ids + own.start]
    parts = vocab.side_by_side(torch.cat([column.double() for column in columns], dim=1))
    mass, told, values, ids = parts.view(num_rows, -1, 2 + 2 * num_top).split([1, 1, num_top, num_top], dim=2)
    mass = mass.flatten(1).logsumexp(-1)
    token_logit = told.flatten(1).amax(-1, keepdim=True)
    likelier = (logits > token_logit).sum(-1, keepdim=True).double()
    ranks = 1 + vocab.side_by_side(likelier).view(num_rows, -1).sum(-1).long()
    # Stable: of equal ones those of the first rank, which has the lowest ids.
    top_values, order = values.flatten(1).sort(dim=-1, descending=True, stable=True)
    top_ids = ids.flatten(1).gather(1, order[:, :num_top]).long()
    own_logprobs = (token_logit.squeeze(1) - mass).float()
    return own_logprobs, top_ids, (top_values[:, :num_top] - mass[:, None]).float(), ranks


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` highest of each row and where they stand; minus infinity fills up where there are fewer."""
    values, ids = top_tokens(logits, min(count, logits.shape[1]))
    missing = (0, count - values.shape[1])
    pad = torch.nn.functional.pad
    return pad(values, missing, value=float("-inf")), pad(ids, missing)


def _race(weights: Tensor, streams: Streams, vocab: VocabShard) -> tuple[Tensor, Tensor]:
    """Draw one of its columns a row with probabilities proportional to ``weights``, by two exponential races.

    Returns when its stretch arrives, the soonest of all ranks' wins, and which column it is.

    The least of ``e_i / w_i``, with independent exponential ``e_i``, is at ``i`` with probability ``w_i / sum(w)``
    (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). First stretches of the vocabulary race with the sums of their
    weights, then the tokens of the winner: that takes few random numbers, and whoever wins does so by a margin, so
    that logits which differ in their last bits hardly ever change a draw. Inverting the distribution with one number
    would move every later boundary.
    """
    num_rows, width = weights.shape
    num_stretches = -(-width // STRETCH)
    if num_stretches * STRETCH != width:
        weights = torch.nn.functional.pad(weights, (0, num_stretches * STRETCH - width))
    stretches = weights.view(num_rows, num_stretches, STRETCH)
    sums = stretches.sum(-1, dtype=torch.float64)
    heats, finals = exponentials(streams, (-(-vocab.size // STRETCH), STRETCH))
    first = vocab.own.start // STRETCH
    arrivals = heats[:, first : first + num_stretches] / sums
    stretch = arrivals.argmin(-1)
    rows = torch.arange(num_rows, device=weights.device)
    token = (finals / stretches[rows, stretch].double()).argmin(-1)
    return arrivals[rows, stretch], stretch * STRETCH + token


def _winner(scores: Tensor, columns: Tensor, vocab: VocabShard) -> Tensor:
    """The token of the rank with the lowest score, of the first one if they are equal.

    NaN and infinity among logits become scores that win and are no numbers: NaN counts as the lowest.
    """
    told = vocab.side_by_side(torch.stack([scores, (columns + vocab.own.start).double()], dim=1))
    scores, tokens = told.view(len(scores), -1, 2).unbind(2)
    first = scores.argmin(-1, keepdim=True)
    token_ids = torch.where(scores.gather(1, first).isfinite(), tokens.gather(1, first), NO_TOKEN)
    return token_ids.squeeze(1).long()
