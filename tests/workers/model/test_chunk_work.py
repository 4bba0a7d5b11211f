"""The cutting of few new tokens over long contexts, and that a step's attention follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.chunk_attention import can_attend
from kernels.decode_attention_work import DecodeAttention, DecodeWork
from kernels.prefill_attention import prefill_attention_ref
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.batch import Batch
from workers.model.chunk_work import MAX_ROWS, MAX_TOKENS, SLOW_PROMPTS, TILE, ChunkCut, chunk_cut
from workers.model.step_attention import attend

rows = st.lists(
    st.tuples(st.integers(0, MAX_TOKENS // MAX_ROWS), st.integers(0, 9000)), min_size=1, max_size=MAX_ROWS
).filter(lambda rows: sum(count for count, _ in rows) > 0)


def make_cut(queries: int, num_shares: int) -> ChunkCut:
    """One for a device whose multiprocessors have so many heads each that pieces always pay."""
    return ChunkCut(queries, num_shares, heads_a_processor=100.0, kv_heads_a_processor=0.0)


@given(
    rows=rows,
    num_decodes=st.integers(0, 20),
    queries=st.sampled_from([1, 9, 16, 64]),
    shares=st.integers(1, 70),
)
def test_pieces_cover_what_each_query_sees_and_are_merged_by_it(
    rows: list[tuple[int, int]], num_decodes: int, queries: int, shares: int
) -> None:
    counts, before = np.array(rows, dtype=np.int64).T
    starts = num_decodes + np.concatenate(([0], np.cumsum(counts)))

    cut = make_cut(queries, shares).cut(starts, before + counts, int(starts[-1]))

    assert cut is not None
    assert cut.shares[0] == 0
    assert cut.shares[-1] == len(cut.items)
    assert not cut.merges[:num_decodes].any()
    for row, (count, context) in enumerate(rows):
        for query in range(count):
            first, num_pieces, offset, _ = cut.merges[starts[row] + query]
            pieces = cut.items[first : first + num_pieces]
            tile = cut.tiles[pieces[0, 0]]
            assert (pieces[:, 0] == pieces[0, 0]).all()
            assert (pieces[:, 1] == row).all()
            assert (pieces[:, 7] == num_pieces).all()
            assert pieces[:, 4].tolist() == [*range(first, first + num_pieces)]
            assert tile.tolist() == [row, starts[row] + query - offset, tile[2], context + query - offset]
            assert offset < tile[2] <= queries
            assert pieces[0, 2] == 0
            assert (pieces[1:, 2] == pieces[:-1, 3]).all()
            assert context + query < pieces[-1, 3] < context + count + TILE


@given(rows=rows, queries=st.sampled_from([1, 9, 16, 64]), shares=st.integers(1, 70))
def test_graphs_have_room_for_every_cut(rows: list[tuple[int, int]], queries: int, shares: int) -> None:
    counts, before = np.array(rows, dtype=np.int64).T
    starts, way = np.concatenate(([0], np.cumsum(counts))), make_cut(queries, shares)

    cut = way.cut(starts, before + counts, int(starts[-1]))

    assert cut is not None
    for part, most in zip((cut.tiles, cut.items, cut.shares, cut.merges), way.shapes().values(), strict=True):
        assert len(part) <= most[0]
        assert part.shape[1:] == most[1:]


def test_a_lone_prompts_context_is_shared_by_many_programs() -> None:
    way = chunk_cut(num_heads=32, num_kv_heads=8, num_processors=132)

    assert way == ChunkCut(16, 33, heads_a_processor=32 / 132, kv_heads_a_processor=8 / 132)
    cut = way.cut(np.array([0, 16]), np.array([8016]), 16)
    assert cut is not None
    lengths = cut.items[:, 3] - cut.items[:, 2]
    assert len(cut.items) == 32
    assert lengths.max() == 4 * TILE
    assert np.diff(cut.shares).max() == 1


@pytest.mark.parametrize("counts", [[MAX_TOKENS + 1], [1] * (MAX_ROWS + 1), [0]])
def test_many_queries_and_none_are_left_to_others(counts: list[int]) -> None:
    starts = np.cumsum([0, *counts])

    assert make_cut(16, 33).cut(starts, np.array(counts) + 5000, int(starts[-1])) is None


MEASURED = {
    (32, 8): [
        *((1, 16, 500, 14.6, 9.4), (1, 16, 1000, 18.7, 10.9), (1, 16, 8000, 99.9, 21.4)),
        *((1, 128, 1000, 22.5, 25.0), (1, 128, 4000, 57.8, 46.0), (4, 32, 2000, 31.9, 30.9)),
        *((16, 8, 200, 28.8, 16.2), (16, 8, 500, 40.5, 22.4), (16, 8, 4000, 208.7, 89.8)),
    ],
    (64, 8): [
        *((1, 16, 500, 15.0, 13.5), (1, 16, 2000, 30.4, 17.2), (1, 128, 2000, 34.2, 50.7)),
        *((1, 128, 8000, 103.8, 141.3), (4, 32, 2000, 58.3, 51.1), (16, 8, 500, 76.4, 28.6)),
    ],
    (16, 8): [
        *((1, 16, 500, 14.2, 7.9), (1, 64, 1000, 21.0, 14.5), (1, 128, 8000, 103.7, 44.4)),
        *((8, 16, 1000, 20.9, 20.0), (8, 16, 4000, 58.2, 51.6), (16, 8, 500, 23.5, 19.6)),
    ],
    (28, 4): [(1, 8, 500, 12.7, 8.9), (1, 128, 2000, 33.6, 30.4), (8, 16, 1000, 34.3, 20.8)],
    (8, 1): [(1, 16, 500, 14.3, 7.2), (1, 128, 1000, 22.0, 14.2), (16, 8, 200, 9.8, 8.6)],
}
"""By query and KV heads: prompts, new tokens and tokens before of each, us a layer on an H200 by the other kernel and
in pieces. ``ChunkCut.pays`` has two constants, which were chosen with 115 cases, these among them."""
HOST_US = 6.0
"""What the host takes to cut, spread over layers: inferred from first tokens, not timed alone."""


OVER_8_BITS = {
    (32, 8): [
        *((1, 16, 500, 19.1, 8.6), (1, 16, 2000, 57.9, 12.3), (1, 128, 8000, 218.3, 77.7)),
        *((4, 32, 2000, 68.4, 29.4), (16, 8, 500, 40.4, 20.7)),
    ],
    (64, 8): [(1, 16, 500, 19.2, 12.7), (1, 128, 8000, 238.6, 145.5), (4, 32, 2000, 70.4, 50.7)],
}
"""As above over a cache of e4m3, which the other kernel reads slowly. None of these was used to choose anything."""


@pytest.mark.parametrize(
    ("heads", "case", "pace"),
    [
        (heads, case, pace)
        for measured, pace in ((MEASURED, 1.0), (OVER_8_BITS, SLOW_PROMPTS))
        for heads, cases in measured.items()
        for case in cases
    ],
)
def test_pieces_are_made_where_they_were_measured_to_be_faster(
    heads: tuple[int, int], case: tuple[int, int, int, float, float], pace: float
) -> None:
    num_rows, num_new, before, old_us, new_us = case
    way = chunk_cut(*heads, num_processors=132, other_pace=pace)
    assert way is not None
    starts, lens = np.arange(num_rows + 1) * num_new, np.full(num_rows, before + num_new)

    taken_us = new_us + HOST_US if way.pays(starts, lens) else old_us

    assert taken_us <= min(new_us + HOST_US, old_us) + 7.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_was_not_tried_on_a_gpu_is_left_to_others(dtype: torch.dtype) -> None:
    assert can_attend(dtype, dtype, head_dim=128, group=4)
    assert can_attend(dtype, dtype, head_dim=256, group=2)
    assert can_attend(dtype, torch.float8_e4m3fn, head_dim=128, group=4)
    assert not can_attend(dtype, torch.float32, head_dim=128, group=4)
    assert not can_attend(torch.float32, torch.float32, head_dim=128, group=4)
    assert not can_attend(dtype, dtype, head_dim=512, group=4)
    assert not can_attend(dtype, dtype, head_dim=128, group=71)


def test_heads_that_a_program_cannot_hold_are_left_to_others() -> None:
    assert chunk_cut(num_heads=71, num_kv_heads=1, num_processors=132) is None


def make_step(num_new: int) -> tuple[Batch, StepPlan]:
    """A row that has 40 tokens computed and gets ``num_new``."""
    batch = Batch(2, 400, 16, torch.device("cpu"))
    ids = [*range(40 + num_new)]
    new = NewRow(0, ids, len(ids), ChoiceParams(max_tokens=2))
    batch.apply(StepPlan(0, [new], [0], [0], [40], [False], [[3, 1, 4]]))
    blocks = [*range(5, 5 + -(-(40 + num_new) // 16) - 3)]
    plan = StepPlan(1, [], [0], [40], [num_new], [True], [blocks])
    batch.apply(plan)
    return batch, plan


@pytest.mark.parametrize(("num_new", "is_cut"), [(MAX_TOKENS, True), (MAX_TOKENS + 1, False)])
def test_a_step_of_few_new_tokens_is_cut_where_asked(num_new: int, is_cut: bool) -> None:
    batch, plan = make_step(num_new)

    asked = batch.arrays(plan, None, has_work=True, has_tiles=True, chunk_cut=make_cut(16, 4))

    assert (asked.chunks is not None) == is_cut
    assert (batch.upload(asked).prefill_chunks is not None) == is_cut
    unasked = batch.arrays(plan, None, has_work=True, has_tiles=True)
    assert batch.upload(unasked).prefill_chunks is None


def test_attention_follows_the_cut_where_there_is_one() -> None:
    batch, plan = make_step(20)
    arrays = batch.arrays(plan, None, has_work=True, has_tiles=True, chunk_cut=make_cut(16, 4))
    nothing = torch.zeros(0)
    work = DecodeAttention(
        batch.block_tables, DecodeWork(nothing, nothing, nothing, nothing, nothing, nothing), None
    )
    inputs = batch.upload(arrays, decode_work=work)
    q, cache = torch.randn(20, 4, 8), torch.randn(8, 1, 2, 2, 16, 8)
    table, starts, lens = (
        inputs.prefill_block_tables,
        inputs.prefill_query_starts,
        inputs.prefill_context_lens,
    )
    want = prefill_attention_ref(q, cache, 0, table, starts, lens, 0.3)

    # Without the cut, a step needs to know where its rows' queries begin.
    untold = replace(inputs, prefill_query_starts=starts[:0])
    got = attend(q, cache, 0, untold, 0.3)

    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="starts"):
        attend(q, cache, 0, replace(untold, prefill_chunks=None), 0.3)
