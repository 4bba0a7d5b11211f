"""Min-p, top-k and top-p as one number a row: the lowest logit that they keep, found by a search instead of a sort.

A sort of the vocabulary moves all of it several times. The search only counts: each pass over a row asks how many
tokens, or how much of the mass, lie at or above three thresholds, and keeps the quarter between them that matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton

_LANES, _RUN = 512, 8
"""Sums that a pass keeps, and neighbouring tokens that go into one at a time."""
NUM_WARPS = 16
_NEGLIGIBLE = 60.0
"""A token this far below the likeliest, in units of the temperature, is never drawn whatever the filters say: the
draw's exponentials span 2^-33 to 23, so they outweigh at most e^26, once among stretches and once within one."""
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Of a number in float32: the search need not tell apart what the logits cannot."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Three filters, each applied to the distribution that the one before it left; [rows] each, on one device."""

    min_p: Tensor
    """float32: least share of the likeliest token's probability; 0 is off."""
    top_k: Tensor
    """int32: how many of the likeliest tokens; 0 is off."""
    top_p: Tensor
    """float32: least mass of the likeliest tokens (Holtzman et al. 2020); 1 is off."""


def filter_floors_ref(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor:
    """Say in plain torch what ``filter_floors`` must return; it is also the CPU's way."""
    logits, vocab = logits.float(), logits.shape[1]
    floors = logits.amax(-1) + temperatures * filters.min_p.log()
    most = min(int(filters.top_k.max()), vocab)
    if most > 0:
        last = (filters.top_k - 1).clamp(min=0, max=most - 1).long()
        kth = logits.topk(most, dim=-1).values.gather(1, last[:, None])[:, 0]
        floors = torch.where(filters.top_k > 0, floors.maximum(kth), floors)
    for row in (filters.top_p < 1).nonzero().flatten().tolist():
        if temperatures[row] > 0:
            floors[row] = _nucleus_floor(logits[row], temperatures[row], floors[row], filters.top_p[row])
    return torch.where(temperatures > 0, floors, float("-inf"))


def filter_floors(
    logits: Tensor,
    temperatures: Tensor,
    filters: Filters,
    rows: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Return [rows] float32: of each row the lowest logit that its filters keep; minus infinity where none is on.

    Tokens that tie with the last one kept are kept. On CUDA nothing waits for the device, and a bound so low that what
    lies beneath it could not be drawn anyway may come out higher.

    Args:
        logits: [rows, vocab], contiguous.
        temperatures: float32; 0, for the likeliest token, has no use for filters.
        filters: [rows], or by place in the batch.
        rows: [rows] int32, places in the batch of which temperatures and filters are; None: one after the other.
        num_rows: [1] int32; rows from there on are padding and left out. None: there is none.

    Raises:
        ValueError: logits are not contiguous, or of a dtype that is none of the three floating ones.
    """
    if logits.device.type == "cpu" and rows is None:
        return filter_floors_ref(logits, temperatures, filters)
    if not logits.is_contiguous() or logits.dtype not in _UNUSED_BITS:
        raise ValueError(f"logits are {logits.dtype}, contiguous: {logits.is_contiguous()}")
    num_padded, vocab = logits.shape
    floors = torch.empty(num_padded, dtype=torch.float32, device=logits.device)
    pdl = has_pdl(logits.device)
    _filter_floors_kernel[(num_padded,)](
        logits,
        temperatures,
        filters.min_p,
        filters.top_k,
        filters.top_p,
        rows,
        num_rows,
        floors,
        vocab,
        **kernel_constants(vocab, 1 << _UNUSED_BITS[logits.dtype]),
        PDL=pdl,
        num_warps=NUM_WARPS,
        **pdl_options(pdl),
    )
    return floors


def kernel_constants(vocab: int, unit: int) -> dict[str, int | float]:
    """How the kernel walks a row of ``vocab`` logits that differ by multiples of ``unit``: its constants by name."""
    run = min(_RUN, next_power_of_2(vocab))
    return {
        "UNIT": unit,
        "LANES": min(_LANES, next_power_of_2(-(-vocab // run))),
        "RUN": run,
        "NEGLIGIBLE": _NEGLIGIBLE,
    }


def _nucleus_floor(logits: Tensor, temperature: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit of the nucleus of what lies at or above ``floor``; ``logits`` are one row's [vocab]."""
    weights = ((logits - logits.max()) / temperature).exp_().masked_fill_(logits < floor, 0.0)
    total = weights.sum(dtype=torch.float64)
    # Tokens below this weight hold less than what the nucleus may leave out, all of them together.
    candidates = weights >= (1 - top_p.double()) * total / len(logits)
    if not candidates.any():  # logits that are no numbers: nothing is drawn of them
        return floor
    descending, order = weights[candidates].sort(descending=True)
    before = descending.cumsum(0, dtype=torch.float64) - descending
    last = ((before < top_p.double() * total).sum() - 1).clamp(min=0)
    return logits[candidates][order[last]]


@triton.jit
def _filter_floors_kernel(
    logits_ptr,
    temperatures_ptr,
    min_ps_ptr,
    top_ks_ptr,
    top_ps_ptr,
    rows_ptr,
    num_rows_ptr,
    floors_ptr,
    vocab,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program; those without a filter end at once."""
    index = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if num_rows_ptr is not None:  # noqa: SIM102 - one condition is known when the kernel is compiled
        if index >= tl.load(num_rows_ptr):
            return
    row = index
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    temperature = tl.load(temperatures_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    floor = float("-inf")
    if (temperature > 0) & ((min_p > 0) | (top_k > 0) | (top_p < 1)):
        row_ptr = logits_ptr + index.to(tl.int64) * vocab
        highest = _highest(row_ptr, vocab, LANES, RUN)
        # Base 2. Of a row without a finite logit nothing is kept, and nothing asked.
        inverse = 1.4426950408889634 / temperature
        floor = highest - NEGLIGIBLE * temperature
        if min_p > 0:
            floor = tl.maximum(floor, highest + temperature * tl.log(min_p))
        if (top_k > 0) & (top_k < vocab):
            floor = _search(
                row_ptr,
                vocab,
                floor,
                highest,
                inverse,
                top_k.to(tl.float64),
                False,
                UNIT,
                LANES,
                RUN,
            )
        if top_p < 1:
            total, _, _ = _held(row_ptr, vocab, floor, floor, floor, highest, inverse, True, LANES, RUN)
            # The likeliest token is kept whatever the mass wanted.
            wanted = tl.maximum(total * top_p.to(tl.float64), 1e-30)
            floor = _search(row_ptr, vocab, floor, highest, inverse, wanted, True, UNIT, LANES, RUN)
    tl.store(floors_ptr + index, floor)


@triton.jit
def _search(
    row_ptr,
    vocab,
    floor,
    highest,
    inverse,
    wanted,
    BY_MASS: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """The highest logit, no lower than ``floor``, at or above which lies what is ``wanted``."""
    low = _place(floor) & -UNIT
    # Just above the highest logit there is nothing.
    high = (_place(highest) & -UNIT) + UNIT
    turn = 0
    while high - low > UNIT:
        first, second, third = low + (high - low) // 4, low + (high - low) // 2, high - (high - low) // 4
        if turn < 4:
            # Evenly by value, until a quarter of a temperature is left: by place most thresholds would lie around 0.
            bottom = _number(low)
            quarter = (_number(high - UNIT) - bottom) / 4
            first = _place(bottom + quarter)
            second = _place(bottom + 2 * quarter)
            third = _place(bottom + 3 * quarter)
        first = tl.minimum(tl.maximum(first & -UNIT, low + UNIT), high - UNIT)
        second = tl.minimum(tl.maximum(second & -UNIT, low + UNIT), high - UNIT)
        third = tl.minimum(tl.maximum(third & -UNIT, low + UNIT), high - UNIT)
        above_first, above_second, above_third = _held(
            row_ptr,
            vocab,
            _number(first),
            _number(second),
            _number(third),
            highest,
            inverse,
            BY_MASS,
            LANES,
            RUN,
        )
        if above_third >= wanted:
            low = third
        elif above_second >= wanted:
            low, high = second, third
        elif above_first >= wanted:
            low, high = first, second
        else:
            high = first
        turn += 1
    # A floor between two numbers that logits can be stays where it is.
    return tl.maximum(_number(low), floor)


@triton.jit
def _held(
    row_ptr,
    vocab,
    first,
    second,
    third,
    highest,
    inverse,
    BY_MASS: tl.constexpr,
    LANES: tl.constexpr,
    RUN: tl.constexpr,
):
    """What lies at or above each of three thresholds: tokens, or their weights relative to the likeliest's."""
    above_first = tl.zeros([LANES], tl.float32)
    above_second = tl.zeros([LANES], tl.float32)
    above_third = tl.zeros([LANES], tl.float32)
    places = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    ahead = tl.load(row_ptr + places, mask=places < vocab, other=float("-inf"))
    for start in range(LANES * RUN, vocab + LANES * RUN, LANES * RUN):
        logits = ahead.to(tl.float32)
        columns = start + places
        ahead = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        weights = tl.exp2((logits - highest) * inverse) if BY_MASS else tl.full([LANES, RUN], 1.0, tl.float32)
        above_first += tl.sum(tl.where(logits >= first, weights, 0.0), axis=1)
        above_second += tl.sum(tl.where(logits >= second, weights, 0.0), axis=1)
        above_third += tl.sum(tl.where(logits >= third, weights, 0.0), axis=1)
    return (
        tl.sum(above_first.to(tl.float64), axis=0),
        tl.sum(above_second.to(tl.float64), axis=0),
        tl.sum(above_third.to(tl.float64), axis=0),
    )


@triton.jit
def _highest(row_ptr, vocab, LANES: tl.constexpr, RUN: tl.constexpr):
    """The highest logit of a row."""
    tops = tl.full([LANES], float("-inf"), tl.float32)
    places = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for start in range(0, vocab, LANES * RUN):
        columns = start + places
        logits = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, tl.max(logits, axis=1))
    return tl.max(tops, axis=0)


@triton.jit
def _place(number):
    """An integer for each float32 number, in their order."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(place):
    """The number at a place."""
    bits = place.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
