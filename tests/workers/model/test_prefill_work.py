"""The cutting of a step's queries into tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.model.prefill_work import QUERIES, cut_queries, max_num_tiles

rows = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5000)), min_size=1, max_size=20)


@given(rows=rows, first=st.integers(0, 50))
def test_tiles_cover_each_query_once_at_its_position(rows: list[tuple[int, int]], first: int) -> None:
    num_queries, num_before = np.array(rows, dtype=np.int64).T
    starts = first + np.concatenate(([0], np.cumsum(num_queries)))

    tiles = cut_queries(starts, num_before + num_queries)

    assert len(tiles) <= max_num_tiles(int(num_queries.sum()), len(rows))
    seen = [
        (row, place + i, position + i) for row, place, count, position in tiles.tolist() for i in range(count)
    ]
    assert sorted(seen) == [
        (row, int(starts[row]) + i, before + i)
        for row, (count, before) in enumerate(rows)
        for i in range(count)
    ]
    assert (tiles[:, 2] <= QUERIES).all()


def test_tiles_that_see_most_come_first() -> None:
    tiles = cut_queries(np.array([0, 300, 310]), np.array([300, 1010]))

    assert tiles.tolist() == [[1, 300, 10, 1000], [0, 256, 44, 256], [0, 128, 128, 128], [0, 0, 128, 0]]
