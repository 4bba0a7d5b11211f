"""Cuts few new tokens and their long contexts into pieces for ``kernels.chunk_attention``. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.chunk_attention import MERGE_FIELDS, queries_a_tile
from workers.model.attention_work import ITEM_FIELDS, cut_contexts
from workers.model.prefill_work import QUERIES, TILE_FIELDS, cut_queries, max_num_tiles

MAX_TOKENS = 128
"""New tokens of a step's prompts, with more of which tiles of queries fill the device."""
MAX_ROWS = 16
"""Prompts of a step, with more of which their heads fill the device."""
TILE = 64
"""Context tokens; pieces begin at multiples of it."""
_MAX_PIECES = 32
"""Of one context. Each writes a partial result, which is read again: 16 tokens after 8000 take 21 us, with 16 27."""
_OVERHEAD, _RELATIVE_WALK = 650, 1.7
"""Of ``ChunkCut.pays``: what a second kernel and the host's cut cost, in tokens that a program of the other kernel
walks (12 us a thousand on an H200), and how much longer a token takes here (two programs share a multiprocessor).
Chosen for the least loss over 115 cases of five head shapes with an allowance of 6 us a layer for the host."""
SLOW_PROMPTS = 2.0
"""How much longer prompts' attention takes a token where ``kernels.prefill_attention_hopper`` cannot do it, at
least: 24 to 70 us a thousand."""
_PROGRAMS_PER_PROCESSOR = 2
"""What shared memory has room for: tiles of keys and values, three at a time."""

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChunkArrays:
    """What ``kernels.chunk_attention.ChunkWork`` says, before it is on the device; all int32."""

    tiles: Array
    """[num_tiles, 4]."""
    items: Array
    """[num_items, 8]."""
    shares: Array
    """[num_shares + 1]."""
    merges: Array
    """[num_tokens, 4]."""


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """How a rank cuts the attention of few new tokens."""

    queries: int
    """New tokens of a program, at most."""
    num_shares: int
    """Programs for each KV head."""
    heads_a_processor: float
    """Query heads for each of the device's multiprocessors."""
    kv_heads_a_processor: float
    other_pace: float = 1.0
    """Time that the other kernel takes a token, of what it takes on sm_90 at best."""

    def pays(self, starts: NDArray[np.int64], context_lens: NDArray[np.int64]) -> bool:
        """True where pieces are expected to be faster than a program a head and ``QUERIES`` new tokens; see ``cut``."""
        counts = np.diff(starts)
        rounds = np.ceil((-(-counts // QUERIES)).sum() * self.heads_a_processor)
        walked = (-(-counts // self.queries) * context_lens).sum() * self.kv_heads_a_processor
        return bool(context_lens.max() * rounds * self.other_pace > _OVERHEAD + _RELATIVE_WALK * walked)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The largest shapes of ``cut``'s arrays in their order, for steps of ``MAX_TOKENS`` tokens in all."""
        num_tiles = max_num_tiles(MAX_TOKENS, MAX_ROWS, self.queries)
        return {
            "chunk_tiles": (num_tiles, TILE_FIELDS),
            "chunk_items": (num_tiles + self.num_shares, ITEM_FIELDS),
            "chunk_shares": (self.num_shares + 1,),
            "chunk_merges": (MAX_TOKENS, MERGE_FIELDS),
        }

    def cut(
        self, starts: NDArray[np.int64], context_lens: NDArray[np.int64], num_tokens: int
    ) -> ChunkArrays | None:
        """Cut queries into tiles and what each tile sees into pieces of about equal length; None: too many queries.

        Args:
            starts: [num_rows + 1]: where each row's queries begin among the step's, then where the last one's end.
            context_lens: [num_rows]: tokens of the row, its queries included.
            num_tokens: of the step, those of decoding rows included.
        """
        if not 0 < starts[-1] - starts[0] <= MAX_TOKENS or len(context_lens) > MAX_ROWS:
            return None
        tiles = cut_queries(starts, context_lens, self.queries)
        num_queries = tiles[:, 2]
        lengths = -(-(tiles[:, 3] + num_queries) // TILE)
        rows = tiles[:, 0].astype(np.int32)
        pieces = cut_contexts(rows, lengths, self.num_shares, tile=TILE, max_pieces=_MAX_PIECES)
        counts = np.bincount(pieces.items[:, 0])
        index = np.repeat(np.arange(len(tiles)), num_queries)
        offsets = np.arange(len(index)) - (np.cumsum(num_queries) - num_queries)[index]
        merges = np.zeros((num_tokens, MERGE_FIELDS), dtype=np.int32)
        places = tiles[index, 1] + offsets
        merges[places, 0] = (np.cumsum(counts) - counts)[index]
        merges[places, 1] = counts[index]
        merges[places, 2] = offsets
        return ChunkArrays(tiles.astype(np.int32), pieces.items, pieces.shares, merges)


def chunk_cut(
    num_heads: int, num_kv_heads: int, num_processors: int, other_pace: float = 1.0
) -> ChunkCut | None:
    """How to cut for a rank's heads and a device's multiprocessors; None: a KV head has too many query heads."""
    queries = queries_a_tile(num_heads // num_kv_heads)
    if not queries:
        return None
    num_shares = max(num_processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads, 1)
    return ChunkCut(
        queries, num_shares, num_heads / num_processors, num_kv_heads / num_processors, other_pace
    )
