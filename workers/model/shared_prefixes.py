"""Finds, from block tables, rows of a step whose contexts begin with the same blocks, and cuts what they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.model.attention_work import TILE, Array, SharedPieces

SHARED_FIELDS = 8
"""As ``kernels.shared_prefix_attention`` reads them."""
MAX_PIECES = 8
"""Most pieces of one prefix: each adds a partial result to every row."""
_FEWEST_ROWS = 4
_FEWEST_SAVED_TOKENS = 8192
"""Reads of KV that sharing must save in a layer: 33 MB at 8 heads of 128 in bfloat16, 8 us of an H200's memory, more
than the extra kernel takes."""
_PROGRAMS = 264
"""Programs that keep the device busy: two a multiprocessor of an H200."""


@dataclass(frozen=True, slots=True)
class SharedCut:
    """Groups of rows and the pieces of their prefixes."""

    pieces: SharedPieces
    members: Array
    """Indices of the step's tokens, those of one group side by side."""
    items: Array
    """[num_items, 8]."""


class SharedPrefixes:
    """Remembers the last answer: it holds as long as the same rows decode."""

    def __init__(self, block_size: int, num_kv_heads: int, members_a_piece: int) -> None:
        """Nothing is known yet.

        Args:
            block_size: tokens a block.
            num_kv_heads: of this rank.
            members_a_piece: rows that one program of the kernel attends for.
        """
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._members_a_piece = members_a_piece
        self._rows: Array = np.empty(0, dtype=np.int32)
        self._found: SharedCut | None = None

    def forget(self) -> None:
        """Rows have changed their contents."""
        self._rows = np.empty(0, dtype=np.int32)

    def find(self, rows: Array, starts: Array, block_tables: Array) -> SharedCut | None:
        """Return what the rows share, or None.

        Args:
            rows: places in the batch.
            starts: position of the token that each computes: what is shared ends before it.
            block_tables: of all places in the batch, on the host.
        """
        if not np.array_equal(rows, self._rows):
            self._rows = rows.copy()
            self._found = self._search(rows, starts, block_tables)
        return self._found

    def _search(self, rows: Array, starts: Array, block_tables: Array) -> SharedCut | None:
        if len(rows) < _FEWEST_ROWS:
            return None
        _, group_of, counts = np.unique(block_tables[rows, 0], return_inverse=True, return_counts=True)
        groups: list[tuple[NDArray[np.int64], int]] = []
        for group in np.flatnonzero(counts >= _FEWEST_ROWS):
            members = np.flatnonzero(group_of == group)
            limit = int(starts[members].min()) // self._block_size
            tables = block_tables[rows[members], :limit]
            same = (tables == tables[0]).all(axis=0)
            num_blocks = limit if same.all() else int(same.argmin())
            num_tiles = num_blocks * self._block_size // TILE
            if num_tiles * TILE * (len(members) - 1) >= _FEWEST_SAVED_TOKENS:
                groups.append((members, num_tiles))
        return self._cut(rows, groups) if groups else None

    def _cut(self, rows: Array, groups: list[tuple[NDArray[np.int64], int]]) -> SharedCut:
        num_chunks = sum(-(-len(members) // self._members_a_piece) for members, _ in groups)
        most = max(1, min(MAX_PIECES, _PROGRAMS // (num_chunks * self._num_kv_heads)))
        shared_tiles, counts = np.zeros((2, len(rows)), dtype=np.int64)
        items: list[tuple[int, ...]] = []
        first = 0
        for members, num_tiles in groups:
            length = -(-num_tiles // most)
            starts = range(0, num_tiles, length)
            shared_tiles[members], counts[members] = num_tiles, len(starts)
            for begin in range(0, len(members), self._members_a_piece):
                size = min(self._members_a_piece, len(members) - begin)
                for piece, start in enumerate(starts):
                    end = min(start + length, num_tiles)
                    items.append(
                        (first + begin, size, int(rows[members[0]]), start * TILE, end * TILE, piece, 0, 0)
                    )
            first += len(members)
        return SharedCut(
            SharedPieces(shared_tiles, counts),
            np.concatenate([members for members, _ in groups]).astype(np.int32),
            np.array(items, dtype=np.int32),
        )
