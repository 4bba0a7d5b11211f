"""Counter-based random numbers: the same for the same key and counter, on every device and in every batch."""

from __future__ import annotations

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


def uniforms(seeds: Tensor, choice_indexes: Tensor, positions: Tensor) -> Tensor:
    """Return one float64 in [0, 1) for each (seed, choice index, position), all int64 of one shape."""
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    zero = positions * 0
    words = philox_4x32(key, (positions & _MASK, choice_indexes & _MASK, zero, zero))
    return ((words[0] >> 5) * 67108864 + (words[1] >> 6)).double() / 9007199254740992.0
