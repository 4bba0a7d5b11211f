"""The cutting of decode attention into equal shares, and the finding of shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.model.attention_work import TILE, cut_contexts
from workers.model.shared_prefixes import SharedPrefixes


@given(
    context_lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    num_shares=st.integers(1, 60),
    is_deterministic=st.booleans(),
)
def test_pieces_cover_each_context_once(
    context_lens: list[int], num_shares: int, is_deterministic: bool
) -> None:
    rows = np.arange(len(context_lens), dtype=np.int32)[::-1].copy()
    num_tiles = -(-np.array(context_lens, dtype=np.int64) // TILE)

    cut = cut_contexts(rows, num_tiles, num_shares, is_deterministic)

    assert cut.shares[0] == 0
    assert cut.shares[-1] == len(cut.items)
    assert (np.diff(cut.shares) >= 0).all()
    assert cut.items[:, 4].tolist() == list(range(len(cut.items)))
    for index, row in enumerate(rows):
        pieces = cut.items[cut.items[:, 0] == index]
        assert (pieces[:, 1] == row).all()
        assert pieces[0, 2] == 0
        assert pieces[-1, 3] == num_tiles[index] * TILE
        assert (pieces[1:, 2] == pieces[:-1, 3]).all()
        assert (pieces[:, 5] == pieces[0, 4]).all()
        assert (pieces[:, 6:] == len(pieces)).all()


def test_shares_differ_by_a_tile_where_contexts_are_short() -> None:
    num_tiles = np.full(256, 18, dtype=np.int64)

    cut = cut_contexts(np.arange(256, dtype=np.int32), num_tiles, 49)

    lengths = (cut.items[:, 3] - cut.items[:, 2]) // TILE
    per_share = [lengths[a:b].sum() for a, b in zip(cut.shares, cut.shares[1:], strict=False)]
    assert max(per_share) <= 256 * 18 // 49 + 1
    assert len(cut.items) <= 256 + 49


@pytest.mark.parametrize(
    ("num_tiles", "num_pieces"),
    [([62], 21), ([250], 42), ([1000], 91), ([4000], 130), ([4000] + [18] * 8, 125)],
)
def test_the_longer_a_context_the_more_pieces_it_has(num_tiles: list[int], num_pieces: int) -> None:
    """Alone these take 14, 25, 55 and 146 us on an H200; the best of 16 to 132 pieces 13.5, 24.7, 54.6 and 145.6."""
    cut = cut_contexts(np.arange(len(num_tiles), dtype=np.int32), np.array(num_tiles), 132)

    assert (cut.items[:, 0] == 0).sum() == num_pieces


def test_fixed_pieces_depend_on_a_rows_length_alone() -> None:
    lone = cut_contexts(np.zeros(1, dtype=np.int32), np.array([50]), 7, is_deterministic=True)
    among = cut_contexts(np.arange(3, dtype=np.int32), np.array([9, 50, 2]), 5, is_deterministic=True)

    assert (among.items[among.items[:, 0] == 1][:, 2:4] == lone.items[:, 2:4]).all()


@pytest.fixture
def tables() -> np.ndarray:
    """Rows 0 to 5 share 40 blocks, rows 6 to 9 share 2 of 60, row 10 is alone."""
    tables = np.arange(11 * 60, dtype=np.int32).reshape(11, 60) + 1000
    tables[:6, :40] = np.arange(40)
    tables[6:10, :2] = [50, 51]
    return tables


def test_rows_with_a_long_common_prefix_are_found(tables: np.ndarray) -> None:
    rows = np.array([10, 3, 0, 6, 5, 1, 2, 4, 7, 8, 9], dtype=np.int32)
    starts = np.full(11, 2800, dtype=np.int32)

    found = SharedPrefixes(64, 8, members_a_piece=4).find(rows, starts, tables)

    assert found is not None
    assert sorted(rows[found.members].tolist()) == [0, 1, 2, 3, 4, 5]
    assert set(found.pieces.num_tiles[found.members]) == {40 * 64 // TILE}
    assert found.pieces.num_tiles.sum() == 6 * 40 * 64 // TILE
    for first, count in {(item[0], item[1]) for item in found.items.tolist()}:
        spans = [item[3:5].tolist() for item in found.items if item[0] == first]
        assert count <= 4
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == 2560


def test_few_rows_or_short_prefixes_are_left_alone(tables: np.ndarray) -> None:
    starts = np.full(4, 2800, dtype=np.int32)
    prefixes = SharedPrefixes(64, 8, members_a_piece=32)

    assert prefixes.find(np.array([0, 1, 2], dtype=np.int32), starts[:3], tables) is None
    assert prefixes.find(np.array([6, 7, 8, 9], dtype=np.int32), starts, tables) is None


def test_own_pieces_begin_behind_what_is_shared(tables: np.ndarray) -> None:
    rows, starts = np.arange(11, dtype=np.int32), np.full(11, 2800, dtype=np.int32)
    found = SharedPrefixes(64, 8, members_a_piece=32).find(rows, starts, tables)
    assert found is not None

    cut = cut_contexts(rows, starts.astype(np.int64) // TILE + 1, 20, shared=found.pieces)

    for index in range(11):
        pieces = cut.items[cut.items[:, 0] == index]
        num_shared = found.pieces.counts[index]
        assert pieces[0, 2] == found.pieces.num_tiles[index] * TILE
        assert (pieces[:, 7] == len(pieces) + num_shared).all()
        assert cut.first_shared_slots[index] == pieces[-1, 4] + 1
    slots = [
        set(range(i[5], i[5] + i[7])) for i in cut.items[np.unique(cut.items[:, 0], return_index=True)[1]]
    ]
    assert sum(map(len, slots)) == len(set().union(*slots))
