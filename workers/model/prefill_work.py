"""Cuts the queries of a step's prompts into tiles for the kernels of prefill attention. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

QUERIES = 128
"""Of a tile, as ``kernels.prefill_attention_hopper`` takes them."""
TILE_FIELDS = 4
"""As kernels read them: row, first query's place, number of queries, position of the first."""


def max_num_tiles(num_tokens: int, num_rows: int, queries: int = QUERIES) -> int:
    """Most tiles of ``queries`` that ``num_tokens`` queries of ``num_rows`` rows can need."""
    return num_tokens // queries + num_rows


def cut_queries(
    starts: NDArray[np.int64], context_lens: NDArray[np.int64], queries: int = QUERIES
) -> NDArray[np.int64]:
    """Return tiles [num_tiles, 4], those whose queries look at most tokens first.

    Programs take tiles in turn, so that in this order all have about the same to do.

    Args:
        starts: [num_rows + 1]: where each row's queries begin among the step's, then where the last one's end.
        context_lens: [num_rows]: tokens of the row, its queries included.
        queries: of a tile, at most.
    """
    num_queries = np.diff(starts)
    counts = -(-num_queries // queries)
    rows = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * queries
    tiles = np.empty((len(rows), TILE_FIELDS), dtype=np.int64)
    tiles[:, 0] = rows
    tiles[:, 1] = starts[:-1][rows] + offsets
    tiles[:, 2] = np.minimum(num_queries[rows] - offsets, queries)
    tiles[:, 3] = (context_lens - num_queries)[rows] + offsets
    return tiles[np.argsort(-tiles[:, 3], kind="stable")]
