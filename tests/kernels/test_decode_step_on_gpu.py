"""The kernels of a decode step's graph against their references on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import few_rows, gemv
from kernels.decode_attention_work import (
    DecodeAttention,
    DecodeWork,
    decode_attention,
    decode_attention_over_work,
    decode_attention_over_work_ref,
)
from kernels.decode_prepare import DecodeColumns, decode_prepare, decode_prepare_ref
from kernels.draw import DrawParams, draw, draw_ref, draw_scratch_len
from kernels.filters import Filters
from kernels.shared_prefix_attention import SharedWork, members_a_piece
from workers.model.attention_work import TILE, cut_contexts
from workers.model.shared_prefixes import SharedPrefixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: str(dtype).rpartition(".")[2])


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """NaN never passes."""
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert error <= TOLERANCES[dtype], f"relative error {error:.2e}"


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@dtypes
@pytest.mark.parametrize(("width", "num_out"), [(576, 7), (4096, 130), (14336, 33), (1024, 500)])
def test_gemv(dtype: torch.dtype, width: int, num_out: int) -> None:
    x, norm, bias = (
        randn(1, width, dtype=dtype),
        randn(width, dtype=dtype),
        randn(num_out, dtype=dtype),
    )
    weight, twice = (randn(n, width, dtype=dtype) * 0.05 for n in (num_out, 2 * num_out))
    residual = randn(1, num_out, dtype=dtype)
    want_residual = residual.clone()

    gemv.linear_add(x, weight, residual)
    gemv.linear_add_ref(x, weight, want_residual)

    assert_close(residual, want_residual, dtype)
    for one in (norm, None):
        got = gemv.norm_linear(x, one, weight, bias, 1e-5)
        assert_close(got, gemv.norm_linear_ref(x, one, weight, bias, 1e-5), dtype)
    gated = gemv.norm_gate_up(x, norm, twice, 1e-5)
    assert_close(gated, gemv.norm_gate_up_ref(x, norm, twice, 1e-5), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [2, 8, 16, 23, 32, 48, 64])
def test_products_of_few_rows(dtype: torch.dtype, num_rows: int) -> None:
    for width, num_out in ((4096, 1024), (14336, 256), (1024, 3072), (512, 14336)):
        x, weight = randn(num_rows, width, dtype=dtype), randn(num_out, width, dtype=dtype) * 0.05
        assert few_rows.fits(weight, num_rows)
        residual, norm = randn(num_rows, num_out, dtype=dtype), randn(num_out, dtype=dtype)
        want_residual = residual.clone()

        parts = few_rows.linear_parts(x, weight)
        hidden = few_rows.add_rms_norm_of_parts(parts, residual, norm, 1e-5)

        want_parts = few_rows.linear_parts_ref(x, weight, parts.shape[0])
        assert_close(parts, want_parts, dtype)
        assert_close(hidden, few_rows.add_rms_norm_of_parts_ref(want_parts, want_residual, norm, 1e-5), dtype)
        assert_close(residual, want_residual, dtype)
        assert_close(few_rows.few_rows_linear(x, weight), few_rows.few_rows_linear_ref(x, weight), dtype)
        assert_close(few_rows.few_rows_gate_up(x, weight), few_rows.few_rows_gate_up_ref(x, weight), dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("block_size", "group", "is_deterministic"), [(16, 4, False), (32, 1, True), (64, 7, False)]
)
def test_decode_attention_over_work(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    group: int,
    is_deterministic: bool,
) -> None:
    lens = [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 4097]
    _check_work(make_cache, dtype, head_dim, block_size, group, lens, is_deterministic)


@pytest.mark.parametrize("lens", [[33000], [131072, 5], [1], [40] * 300, [577] * 64])
def test_decode_attention_over_much_work(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]], lens: list[int]
) -> None:
    _check_work(make_cache, torch.bfloat16, 128, 16, 4, lens, False)


def _check_work(make_cache, dtype, head_dim, block_size, group, lens, is_deterministic) -> None:
    num_kv_heads, num_rows = 2, len(lens)
    cache, tables = make_cache(lens, num_kv_heads, block_size, head_dim, dtype, "cuda")
    order = np.random.default_rng(0).permutation(num_rows).astype(np.int32)
    context_lens = np.array(lens, dtype=np.int32)[order]
    cut = cut_contexts(order, -(-context_lens.astype(np.int64) // TILE), 49, is_deterministic)
    num_heads, max_items = num_kv_heads * group, len(cut.items)
    work = DecodeWork(
        torch.from_numpy(cut.items).cuda(),
        torch.from_numpy(cut.shares).cuda(),
        torch.from_numpy(context_lens - 1).cuda(),
        torch.full((max_items, num_heads, head_dim), float("nan"), device="cuda"),
        torch.full((max_items, num_heads), float("nan"), device="cuda"),
        torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device="cuda"),
    )
    q = randn(num_rows, num_heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    rows, row_lens = torch.from_numpy(order).cuda(), torch.from_numpy(context_lens).cuda()
    want = torch.cat(
        [
            decode_attention_over_work_ref(
                q[i : i + 1].float(),
                cache.nan_to_num(),
                1,
                tables,
                rows[i : i + 1],
                row_lens[i : i + 1],
                scale,
            )
            for i in range(num_rows)
        ]
    )

    for _ in range(20):
        got = decode_attention_over_work(q, cache, 1, tables, work, scale)
        assert_close(got, want, dtype)
        assert not work.counters.any()
        work.partial.fill_(float("nan"))


@dtypes
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (80, 1), (128, 4), (128, 2)])
def test_shared_prefixes_change_nothing(dtype: torch.dtype, head_dim: int, group: int) -> None:
    block_size, num_kv_heads, num_rows, num_shared = 16, 2, 50, 40
    generator = np.random.default_rng(0)
    starts = generator.integers(700, 1000, num_rows).astype(np.int32)
    tables = generator.permutation(num_rows * 64).astype(np.int32).reshape(num_rows, 64)
    tables[:45, :num_shared] = tables[0, :num_shared]
    rows = generator.permutation(num_rows).astype(np.int32)
    found = SharedPrefixes(block_size, num_kv_heads, members_a_piece(group)).find(rows, starts, tables)
    assert found is not None
    cut = cut_contexts(rows, starts.astype(np.int64) // TILE + 1, 49, shared=found.pieces)
    num_heads, num_slots = num_kv_heads * group, int((cut.items[:, 5] + cut.items[:, 7]).max())
    cuda = {
        name: torch.from_numpy(array).cuda()
        for name, array in {
            "items": cut.items,
            "shares": cut.shares,
            "starts": starts,
            "tables": tables,
            "rows": rows,
            "shared": found.items,
            "count": np.array([len(found.items)], dtype=np.int32),
            "members": found.members,
            "slots": cut.first_shared_slots,
        }.items()
    }
    work = DecodeWork(
        cuda["items"],
        cuda["shares"],
        cuda["starts"],
        torch.full((num_slots, num_heads, head_dim), float("nan"), device="cuda"),
        torch.full((num_slots, num_heads), float("nan"), device="cuda"),
        torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device="cuda"),
    )
    shared = SharedWork(cuda["shared"], cuda["count"], cuda["members"], cuda["slots"], 264)
    cache = randn(num_rows * 64, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    q = randn(num_rows, num_heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5

    lens, attention = cuda["starts"] + 1, DecodeAttention(cuda["tables"], work, shared)
    for window, soft_cap in ((0, 0.0), (500, 0.0), (50, 2.0)):
        got = decode_attention(q, cache, 1, attention, scale, None, window, soft_cap)

        args = (cuda["tables"], cuda["rows"], lens, scale, window, soft_cap)
        want = decode_attention_over_work_ref(q.float(), cache.float(), 1, *args)
        assert_close(got, want, dtype)
        work.partial.fill_(float("nan"))


@dtypes
@pytest.mark.parametrize("vocab", [50, 5000, 128256])
def test_draws_are_those_of_the_reference(dtype: torch.dtype, vocab: int) -> None:
    num_rows, padded = 60, 64
    logits = randn(padded, vocab, dtype=dtype) * 2
    params = DrawParams(
        torch.linspace(0, 2, 80, device="cuda"),
        torch.randint(-(2**60), 2**60, (80,), device="cuda"),
        torch.arange(80, device="cuda", dtype=torch.int32) % 3,
        Filters(
            torch.where(torch.arange(80, device="cuda") % 3 == 0, 0.02, 0.0),
            torch.arange(80, device="cuda", dtype=torch.int32) % 4 * 17,
            torch.where(torch.arange(80, device="cuda") % 5 < 3, 0.9, 1.0),
        ),
    )
    rows = torch.randperm(80, device="cuda", dtype=torch.int32)[:padded].contiguous()
    starts = torch.randint(0, 30, (padded,), device="cuda", dtype=torch.int32)
    token_ids = torch.full((80, 40), -1, device="cuda", dtype=torch.int32)
    drawn = torch.full((padded,), -1, device="cuda", dtype=torch.int32)
    count = torch.tensor([num_rows], device="cuda", dtype=torch.int32)
    scratch = torch.empty(draw_scratch_len(padded, vocab), dtype=torch.float64, device="cuda")

    draw(logits, params, count, rows, starts, token_ids, drawn, scratch)

    on_cpu = DrawParams(
        params.temperatures.cpu(),
        params.seeds.cpu(),
        params.choices.cpu(),
        Filters(params.filters.min_p.cpu(), params.filters.top_k.cpu(), params.filters.top_p.cpu()),
    )
    want = draw_ref(logits[:num_rows].cpu(), on_cpu, rows[:num_rows].cpu(), starts[:num_rows].cpu() + 1)
    # Two that arrive at the same time but for rounding may change places, as may one that just fits a filter.
    assert (drawn[:num_rows].cpu() == want).sum() >= num_rows - 1
    assert (drawn[num_rows:] == -1).all()
    stored = token_ids[rows[:num_rows].long(), starts[:num_rows].long() + 1]
    assert torch.equal(stored, drawn[:num_rows])
    assert (token_ids != -1).sum() == num_rows


@dtypes
def test_decode_prepare(dtype: torch.dtype) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    columns = DecodeColumns(ints(3), ints(4, 0, 2, 9), ints(16, 5, 33, 1), ints(7, -1, -1, 3))
    embedding = randn(50, 2500, dtype=dtype)
    token_ids = torch.randint(0, 50, (6, 40), dtype=torch.int32, device="cuda")
    outs = []
    for run in (decode_prepare, decode_prepare_ref):
        tables = torch.arange(18, dtype=torch.int32, device="cuda").view(6, 3).clone()
        positions, slots = torch.full((2, 4), 77, device="cuda")
        hidden = torch.full((4, 2500), 9.0, device="cuda", dtype=dtype)
        run(columns, token_ids, tables, embedding, 16, positions, slots, hidden)
        outs.append((tables, positions, slots, hidden))

    for got, want in zip(*outs, strict=True):
        assert torch.equal(got, want)
