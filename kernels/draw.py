"""From logits to tokens without a sort: sampling inside a decode step's graph, but for what changes logits first.

The draw is that of ``kernels.sampler``: stretches of the vocabulary race, then the tokens of the winner. A program of
the first pass lets sixteen stretches race, the second pass their winners, then the tokens. Where ranks share the
vocabulary each gets so far with its own columns; a third pass takes the best of the ranks' candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.filters import Filters, filter_floors
from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.philox import Streams
from kernels.sampler import NO_TOKEN, STRETCH_RACE, TOKEN_RACE, sample
from kernels.vocab_shard import STRETCH, VocabShard

HEATS = 16
"""Stretches that a program of the first pass sums."""
_NUMBERS = 4
"""Of a program of the first pass: highest logit, where it stands, the winning stretch's score and number."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Sampling parameters by place in the batch, on the device: [max_num_seqs] each."""

    temperatures: Tensor
    """float32, 0 takes the likeliest token."""
    seeds: Tensor
    """int64."""
    choices: Tensor
    """int32."""
    filters: Filters


@dataclass(frozen=True, slots=True)
class DrawShare:
    """Where logits are those of one rank's tokens alone."""

    first_token: int
    """The token of the first column, a multiple of ``STRETCH``."""
    candidates: Tensor
    """[max rows, 2] float64: of each row this rank's best score, the lowest wins, and the token that has it."""
    gather: Callable[[Tensor], Tensor]
    """From [rows, 2] to [ranks, rows, 2], contiguous. On the stream; all ranks do it together."""


def draw_ref(
    logits: Tensor, params: DrawParams, rows: Tensor, positions: Tensor, vocab: VocabShard | None = None
) -> Tensor:
    """Say in plain torch which tokens ``draw`` must take; [num_rows] int64."""
    rows = rows.long()
    streams = Streams(params.seeds[rows], params.choices[rows].long(), positions.long())
    filters = Filters(
        *(one[rows] for one in (params.filters.min_p, params.filters.top_k, params.filters.top_p))
    )
    return sample(logits.float(), params.temperatures[rows], streams, filters, vocab)


def draw(
    logits: Tensor,
    params: DrawParams,
    num_rows: Tensor,
    rows: Tensor,
    starts: Tensor,
    token_ids: Tensor,
    drawn: Tensor,
    scratch: Tensor,
    share: DrawShare | None = None,
) -> None:
    """Draw a token for each row, store it in ``drawn`` and behind the row's tokens.

    Args:
        logits: [padded rows, vocab], contiguous.
        params: by place in the batch.
        num_rows: [1] int32; rows from there on are padding.
        rows: [padded rows] int32, places in the batch.
        starts: [padded rows] int32: position of the token that the logits follow; the new one's is one more.
        token_ids: [max_num_seqs, max tokens] int32; gets the new token at its position.
        drawn: [padded rows] int32; ``NO_TOKEN`` where logits are not numbers, behind the row's tokens 0 stands then.
        scratch: [at least ``draw_scratch_len(padded rows, vocab)``] float64.
        share: what else must be known where ``logits`` are not of all tokens.

    Raises:
        ValueError: ``scratch`` is too short or of another dtype, or logits are not contiguous.
    """
    num_padded, vocab = logits.shape
    num_parts = triton.cdiv(vocab, STRETCH * HEATS)
    if scratch.numel() < draw_scratch_len(num_padded, vocab) or scratch.dtype != torch.float64:
        raise ValueError(f"scratch has {scratch.numel()} numbers of {scratch.dtype}: float64 is needed")
    if not logits.is_contiguous():
        raise ValueError("logits are not contiguous")
    # Of a share of the vocabulary nobody knows what the filters keep: such rows are sampled by other means.
    floors = None
    if share is None:
        floors = filter_floors(logits, params.temperatures, params.filters, rows, num_rows)
    pdl = has_pdl(logits.device)
    first_token = share.first_token if share is not None else 0
    _race_stretches_kernel[(num_padded, num_parts)](
        logits,
        floors,
        params.temperatures,
        params.seeds,
        params.choices,
        num_rows,
        rows,
        starts,
        scratch,
        vocab,
        num_parts,
        first_token,
        STRETCH=STRETCH,
        HEATS=HEATS,
        RACE=STRETCH_RACE,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    _draw_kernel[(num_padded,)](
        logits,
        floors,
        params.temperatures,
        params.seeds,
        params.choices,
        num_rows,
        rows,
        starts,
        scratch,
        token_ids,
        drawn,
        share.candidates if share is not None else None,
        token_ids.stride(0),
        vocab,
        num_parts,
        first_token,
        STRETCH=STRETCH,
        PARTS_PADDED=next_power_of_2(num_parts),
        RACE=TOKEN_RACE,
        NO_TOKEN=NO_TOKEN,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    if share is not None:
        gathered = share.gather(share.candidates[:num_padded])
        _settle_kernel[(num_padded,)](
            gathered,
            num_rows,
            rows,
            starts,
            token_ids,
            drawn,
            token_ids.stride(0),
            num_padded,
            gathered.shape[0],
            RANKS_PADDED=next_power_of_2(gathered.shape[0]),
            NO_TOKEN=NO_TOKEN,
            PDL=pdl,
            num_warps=1,
            **pdl_options(pdl),
        )


def draw_scratch_len(num_rows: int, vocab: int) -> int:
    """float64 numbers that ``draw`` needs between its passes."""
    return _NUMBERS * num_rows * -(-vocab // (STRETCH * HEATS))


@triton.jit
def _log_exponentials(seed, position, choice, lanes, RACE: tl.constexpr):
    """Logarithms of the numbers that ``kernels.philox.exponentials`` gives to ``lanes``."""
    zero = lanes * 0
    word0, word1, word2, word3 = tl.philox(seed, position + zero, choice + zero, lanes // 4, zero + RACE)
    low = tl.where(lanes % 2 == 0, word0, word1)
    high = tl.where(lanes % 2 == 0, word2, word3)
    word = tl.where(lanes % 4 < 2, low, high).to(tl.uint32, bitcast=True)
    return tl.log(-tl.log(1.0 - (word.to(tl.float64) + 0.5) / 4294967296.0))


@triton.jit
def _race_stretches_kernel(
    logits_ptr,
    floors_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    num_rows_ptr,
    rows_ptr,
    starts_ptr,
    scratch_ptr,
    vocab,
    num_parts,
    first_token,
    STRETCH: tl.constexpr,
    HEATS: tl.constexpr,
    RACE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some stretches of one row a program: the highest logit, and where it stands or which stretch wins the race."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index >= tl.load(num_rows_ptr):
        return
    row = tl.load(rows_ptr + index)
    temperature = tl.load(temperatures_ptr + row)
    stretches = part * HEATS + tl.arange(0, HEATS)
    columns = stretches[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    logits = tl.load(
        logits_ptr + index.to(tl.int64) * vocab + columns, mask=columns < vocab, other=float("-inf")
    ).to(tl.float32)
    highest = tl.max(tl.max(logits, axis=1), axis=0)
    place = scratch_ptr + (index.to(tl.int64) * num_parts + part) * 4
    # Comparisons pass NaN over: it is told as infinity, which is as wrong.
    if temperature > 0:
        inverse = 1.0 / temperature
        if floors_ptr is not None:
            logits = tl.where(logits < tl.load(floors_ptr + index), float("-inf"), logits)
        # Each stretch by itself: the same sums whichever others a program has.
        shift = tl.max(logits, axis=1)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        sums = tl.sum(tl.exp((logits - shift[:, None]) * inverse), axis=1).to(tl.float64)
        is_wrong = tl.max((sums != sums).to(tl.int32), axis=0) > 0
        tl.store(place, tl.where(is_wrong, float("inf"), highest).to(tl.float64))
        position = tl.load(starts_ptr + index) + 1
        # Logarithms throughout: stretches know no common highest logit. The lowest score wins.
        scores = _log_exponentials(
            tl.load(seeds_ptr + row),
            position,
            tl.load(choices_ptr + row),
            first_token // STRETCH + stretches,
            RACE,
        )
        scores -= tl.log(sums) + shift.to(tl.float64) * inverse.to(tl.float64)
        best = tl.min(scores, axis=0)
        winner = tl.min(tl.where(scores == best, stretches, 2147483647), axis=0)
        tl.store(place + 2, best)
        tl.store(place + 3, winner.to(tl.float64))
    else:
        is_wrong = tl.max(tl.max((logits != logits).to(tl.int32), axis=1), axis=0) > 0
        first = tl.min(tl.min(tl.where(logits == highest, columns, 2147483647), axis=1), axis=0)
        tl.store(place, tl.where(is_wrong, float("inf"), highest).to(tl.float64))
        tl.store(place + 1, first.to(tl.float64))


@triton.jit
def _draw_kernel(
    logits_ptr,
    floors_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    num_rows_ptr,
    rows_ptr,
    starts_ptr,
    scratch_ptr,
    token_ids_ptr,
    drawn_ptr,
    candidates_ptr,
    token_stride,
    vocab,
    num_parts,
    first_token,
    STRETCH: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    RACE: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: the best of the winning stretches, then the best of its tokens."""
    index = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index >= tl.load(num_rows_ptr):
        return
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(starts_ptr + index) + 1
    temperature = tl.load(temperatures_ptr + row)
    parts = tl.arange(0, PARTS_PADDED)
    is_part = parts < num_parts
    place = scratch_ptr + (index.to(tl.int64) * num_parts + parts) * 4
    tops = tl.load(place, mask=is_part, other=float("-inf"))
    top = tl.max(tops, axis=0)
    is_wrong = (top == float("inf")) | (top == float("-inf"))
    if temperature > 0:
        inverse = (1.0 / temperature).to(tl.float64)
        scores = tl.load(place + 2, mask=is_part, other=float("inf"))
        winners = tl.load(place + 3, mask=is_part, other=2147483647.0)
        best = tl.min(scores, axis=0)
        stretch = tl.min(tl.where(scores == best, winners, 2147483647.0), axis=0)
        stretch = tl.where(is_wrong, 0.0, stretch).to(tl.int32)
        lanes = tl.arange(0, STRETCH)
        columns = stretch * STRETCH + lanes
        logits = tl.load(
            logits_ptr + index.to(tl.int64) * vocab + columns, mask=columns < vocab, other=float("-inf")
        ).to(tl.float32)
        if floors_ptr is not None:
            logits = tl.where(logits >= tl.load(floors_ptr + index), logits, float("-inf"))
        logits = logits.to(tl.float64)
        scores = _log_exponentials(
            tl.load(seeds_ptr + row), position, tl.load(choices_ptr + row), lanes, RACE
        )
        scores -= logits * inverse
        token = tl.min(tl.where(scores == tl.min(scores, axis=0), columns, 2147483647), axis=0)
    else:
        firsts = tl.load(place + 1, mask=is_part, other=2147483647.0)
        best = -top
        token = tl.min(tl.where(tops == top, firsts, 2147483647.0), axis=0).to(tl.int32)
    token = tl.where(is_wrong, NO_TOKEN, token)
    if candidates_ptr is not None:
        # What is wrong wins, so that all ranks hear of it; a rank without a finite logit has nothing to win with.
        best = tl.where(is_wrong, -top, best)
        tl.store(candidates_ptr + index * 2, best)
        tl.store(candidates_ptr + index * 2 + 1, (first_token + token).to(tl.float64))
    else:
        tl.store(drawn_ptr + index, token)
        tl.store(token_ids_ptr + row * token_stride + position, tl.maximum(token, 0))


@triton.jit
def _settle_kernel(
    gathered_ptr,
    num_rows_ptr,
    rows_ptr,
    starts_ptr,
    token_ids_ptr,
    drawn_ptr,
    token_stride,
    num_padded,
    num_ranks,
    RANKS_PADDED: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: the candidate with the lowest score, of the first rank if they are equal."""
    index = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index >= tl.load(num_rows_ptr):
        return
    ranks = tl.arange(0, RANKS_PADDED)
    place = gathered_ptr + (ranks * num_padded + index) * 2
    scores = tl.load(place, mask=ranks < num_ranks, other=float("inf"))
    tokens = tl.load(place + 1, mask=ranks < num_ranks, other=2147483647.0)
    best = tl.min(scores, axis=0)
    token = tl.min(tl.where(scores == best, tokens, 2147483647.0), axis=0).to(tl.int32)
    token = tl.where((best == float("inf")) | (best == float("-inf")), NO_TOKEN, token)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(starts_ptr + index) + 1
    tl.store(drawn_ptr + index, token)
    tl.store(token_ids_ptr + row * token_stride + position, tl.maximum(token, 0))
