"""Counter-based random numbers: the same for the same key and counter, on every device and in every batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Return four random 32-bit words for each key and counter, as int64 tensors.

    Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". All words are int64
    tensors holding 32 bits; products wrap modulo 2^64, which leaves both of their halves right.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class Streams:
    """Where each row draws from: its numbers depend on these three alone. All [num_rows] int64."""

    seeds: Tensor
    choice_indexes: Tensor
    positions: Tensor


def exponentials(streams: Streams, num_lanes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return numbers distributed exponentially with mean 1, float64: [num_rows, lanes] for each race."""
    device = streams.seeds.device
    # A counter gives four lanes their words. All races at once: on a CPU calls cost more than numbers.
    counts = [-(-count // 4) for count in num_lanes]
    lanes = torch.cat([torch.arange(count, device=device) for count in counts])[None, :]
    races = torch.cat([torch.full((count,), race, device=device) for race, count in enumerate(counts)])
    seeds = streams.seeds[:, None]
    positions, choices = streams.positions[:, None] & _MASK, streams.choice_indexes[:, None] & _MASK
    words = philox_4x32((seeds & _MASK, (seeds >> 32) & _MASK), (positions, choices, lanes, races[None, :]))
    numbers = torch.stack(words, dim=-1).flatten(1).double()
    # The logarithm of a number close to 1 is precise: small results, which win races, have all their digits.
    times = numbers.add_(0.5).mul_(-1.0 / 4294967296.0).add_(1.0).log_().neg_()
    parts = times.split([4 * count for count in counts], dim=1)
    return tuple(part[:, :count] for part, count in zip(parts, num_lanes, strict=True))
