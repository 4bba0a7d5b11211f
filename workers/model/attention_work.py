"""Cuts the contexts of a decode step into equal shares of work, for a grid as large as the device. numpy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 8
"""As ``kernels.decode_attention_work`` and ``kernels.chunk_attention`` read them."""
TILE = 32
_MAX_PIECES = 24
"""Of one row of up to 64 tiles; see ``most_pieces``."""
FIXED_PIECE_TILES = 16
"""Of the deterministic mode: boundaries that depend on nothing but a row's own length."""

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPieces:
    """By row: tiles of its context that are attended for several rows at once, and in how many pieces."""

    num_tiles: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of contexts, and which of them each share walks."""

    items: Array
    """[num_items, 8]; slots of partial results are numbered from 0 without gaps."""
    shares: Array
    """[num_shares + 1]: where in ``items`` each share begins."""
    first_shared_slots: Array
    """[rows]: the slot behind each row's own."""


def most_pieces(num_tiles: int, least: int) -> int:
    """In how many pieces to cut one row: its pieces are read side by side, and merged one after the other.

    What both take is least where pieces are as the square root of tiles. On an H200 (8 KV heads of 128, four query
    heads each) a row of 8000 / 32 000 / 128 000 tokens takes 25 / 55 / 146 us; in 24 pieces 30 / 90 / 326.
    """
    return max(least, math.isqrt(9 * num_tiles))


def cut_contexts(
    rows: Array,
    num_tiles: NDArray[np.int64],
    num_shares: int,
    is_deterministic: bool = False,
    shared: SharedPieces | None = None,
    tile: int = TILE,
    max_pieces: int = _MAX_PIECES,
) -> Cut:
    """Lay all contexts end to end, in tiles, and cut the line into shares of equal length.

    There are at most ``len(rows) + num_shares`` pieces, but in the deterministic mode.

    Args:
        rows: places in the batch, in the order of the step's tokens.
        num_tiles: of each row's context, at least 1.
        num_shares: programs for each KV head.
        shared: what of the rows' contexts is left to others, who take slots behind the rows' own; None is nothing.
        is_deterministic: cut at multiples of a fixed length instead, so that a row's result does not depend on
            others; shares then have equal numbers of pieces.
        tile: tokens of a tile.
        max_pieces: of one row of up to ``(max_pieces / 3) ** 2`` tiles, but in the deterministic mode.
    """
    if shared is not None:
        num_tiles = num_tiles - shared.num_tiles
    ends = np.cumsum(num_tiles)
    total = int(ends[-1])
    if is_deterministic:
        counts = -(-num_tiles // FIXED_PIECE_TILES)
        index = np.repeat(np.arange(len(rows)), counts)
        part = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        cuts = (ends - num_tiles)[index] + part * FIXED_PIECE_TILES
        shares = np.arange(num_shares + 1) * -(-len(cuts) // num_shares)
    else:
        longest = int(num_tiles.max())
        length = max(-(-total // num_shares), -(-longest // most_pieces(longest, max_pieces)))
        cuts = np.sort(np.concatenate((ends - num_tiles, np.arange(0, total, length))))
        cuts = cuts[np.diff(cuts, prepend=-1) > 0]
        index = np.searchsorted(ends, cuts, side="right")
        shares = np.searchsorted(cuts, np.arange(num_shares + 1) * length)
    counts = np.bincount(index, minlength=len(rows))
    own_firsts = np.cumsum(counts) - counts
    slot_counts = counts if shared is None else counts + shared.counts
    firsts = np.cumsum(slot_counts) - slot_counts
    first_tiles = ends - num_tiles
    if shared is not None:
        first_tiles = first_tiles - shared.num_tiles
    starts = (cuts - first_tiles[index]) * tile
    items = np.empty((len(cuts), ITEM_FIELDS), dtype=np.int32)
    items[:, 0] = index
    items[:, 1] = rows[index]
    items[:, 2] = starts
    items[:-1, 3] = starts[1:]
    items[own_firsts + counts - 1, 3] = (ends - first_tiles) * tile
    items[:, 4] = firsts[index] + np.arange(len(cuts)) - own_firsts[index]
    items[:, 5] = firsts[index]
    items[:, 6] = counts[index]
    items[:, 7] = slot_counts[index]
    return Cut(items, np.minimum(shares, len(cuts)).astype(np.int32), (firsts + counts).astype(np.int32))
