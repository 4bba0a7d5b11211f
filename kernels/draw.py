"""From logits to tokens in two passes without a sort: the common case of sampling, inside a decode step's graph.

The draw is that of ``kernels.sampler``: one uniform number a row by (seed, choice, position), inverted in vocabulary
order. Pass one sums the weights of stretches of the vocabulary, pass two finds the stretch and the token in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.philox import uniforms
from kernels.sampler import sample

STRETCH = 4096
"""Tokens of the vocabulary that a program of the first pass sums."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Sampling parameters by place in the batch, on the device: [max_num_seqs] each."""

    temperatures: Tensor
    """float32, 0 takes the likeliest token."""
    seeds: Tensor
    """int64."""
    choices: Tensor
    """int32."""


def draw_ref(logits: Tensor, params: DrawParams, rows: Tensor, positions: Tensor) -> Tensor:
    """Say in plain torch which tokens ``draw`` must take; [num_rows] int64."""
    rows = rows.long()
    numbers = uniforms(params.seeds[rows], params.choices[rows].long(), positions.long())
    return sample(logits.float(), params.temperatures[rows], numbers)


def draw(
    logits: Tensor,
    params: DrawParams,
    num_rows: Tensor,
    rows: Tensor,
    starts: Tensor,
    token_ids: Tensor,
    drawn: Tensor,
    scratch: Tensor,
) -> None:
    """Draw a token for each row, store it in ``drawn`` and behind the row's tokens.

    Args:
        logits: [padded rows, vocab], contiguous.
        params: by place in the batch.
        num_rows: [1] int32; rows from there on are padding.
        rows: [padded rows] int32, places in the batch.
        starts: [padded rows] int32: position of the token that the logits follow; the new one's is one more.
        token_ids: [max_num_seqs, max tokens] int32; gets the new token at its position.
        drawn: [padded rows] int32.
        scratch: [at least ``draw_scratch_len(padded rows, vocab)``] float32.

    Raises:
        ValueError: ``scratch`` is too short, or logits are not contiguous.
    """
    num_padded, vocab = logits.shape
    num_stretches = triton.cdiv(vocab, STRETCH)
    if scratch.numel() < draw_scratch_len(num_padded, vocab) or not logits.is_contiguous():
        raise ValueError("scratch is too short, or logits are not contiguous")
    pdl = has_pdl(logits.device)
    _sum_stretches_kernel[(num_padded, num_stretches)](
        logits,
        params.temperatures,
        num_rows,
        rows,
        scratch,
        vocab,
        num_stretches,
        STRETCH=STRETCH,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    _draw_kernel[(num_padded,)](
        logits,
        params.temperatures,
        params.seeds,
        params.choices,
        num_rows,
        rows,
        starts,
        scratch,
        token_ids,
        drawn,
        token_ids.stride(0),
        vocab,
        num_stretches,
        STRETCH=STRETCH,
        STRETCHES_PADDED=next_power_of_2(num_stretches),
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )


def draw_scratch_len(num_rows: int, vocab: int) -> int:
    """float32 numbers that ``draw`` needs between its passes."""
    return 3 * num_rows * -(-vocab // STRETCH)


@triton.jit
def _sum_stretches_kernel(
    logits_ptr,
    temperatures_ptr,
    num_rows_ptr,
    rows_ptr,
    scratch_ptr,
    vocab,
    num_stretches,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Highest logit of a stretch, where it stands, and the sum of weights relative to it."""
    index = tl.program_id(0)
    stretch = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index >= tl.load(num_rows_ptr):
        return
    temperature = tl.load(temperatures_ptr + tl.load(rows_ptr + index))
    columns = stretch * STRETCH + tl.arange(0, STRETCH)
    logits = tl.load(
        logits_ptr + index.to(tl.int64) * vocab + columns, mask=columns < vocab, other=float("-inf")
    ).to(tl.float32)
    highest = tl.max(logits, axis=0)
    first = tl.min(tl.where(logits == highest, columns, 2147483647), axis=0)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp((logits - shift) * inverse), axis=0)
    place = scratch_ptr + (index * num_stretches + stretch) * 3
    tl.store(place, highest)
    tl.store(place + 1, total)
    tl.store(place + 2, first.to(tl.float32, bitcast=True))


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    num_rows_ptr,
    rows_ptr,
    starts_ptr,
    scratch_ptr,
    token_ids_ptr,
    drawn_ptr,
    token_stride,
    vocab,
    num_stretches,
    STRETCH: tl.constexpr,
    STRETCHES_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: the stretch in which the running sum passes the number, then the token."""
    index = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if index >= tl.load(num_rows_ptr):
        return
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(starts_ptr + index) + 1
    temperature = tl.load(temperatures_ptr + row)
    stretches = tl.arange(0, STRETCHES_PADDED)
    is_stretch = stretches < num_stretches
    place = scratch_ptr + (index * num_stretches + stretches) * 3
    tops = tl.load(place, mask=is_stretch, other=float("-inf"))
    highest = tl.max(tops, axis=0)
    if temperature > 0:
        inverse = 1.0 / temperature
        sums = tl.load(place + 1, mask=is_stretch, other=0.0)
        sums = tl.where(tops == float("-inf"), 0.0, sums * tl.exp((tops - highest) * inverse))
        running = tl.cumsum(sums.to(tl.float64), axis=0)
        seed = tl.load(seeds_ptr + row)
        choice = tl.load(choices_ptr + row)
        zero = position * 0
        word0, word1, _, _ = tl.philox(seed, position, choice, zero, zero)
        high = (word0.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
        low = (word1.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)
        number = (high * 67108864.0 + low) / 9007199254740992.0
        target = number * tl.max(running, axis=0)
        stretch = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), num_stretches - 1)
        before = tl.sum(tl.where(stretches < stretch, sums.to(tl.float64), 0.0), axis=0)
        columns = stretch * STRETCH + tl.arange(0, STRETCH)
        logits = tl.load(
            logits_ptr + index.to(tl.int64) * vocab + columns, mask=columns < vocab, other=float("-inf")
        ).to(tl.float32)
        weights = tl.exp((logits - highest) * inverse)
        inside = tl.cumsum(weights, axis=0)
        rest = (target - before).to(tl.float32)
        token = stretch * STRETCH + tl.sum((inside <= rest).to(tl.int32), axis=0)
        # Rounding may leave the target at the very end of the stretch: take its last token with any weight.
        token = tl.minimum(token, tl.max(tl.where(weights > 0, columns, 0), axis=0))
    else:
        firsts = tl.load(place + 2, mask=is_stretch, other=0.0).to(tl.int32, bitcast=True)
        token = tl.min(tl.where(is_stretch & (tops == highest), firsts, 2147483647), axis=0)
    tl.store(drawn_ptr + index, token)
    tl.store(token_ids_ptr + row * token_stride + position, token)
