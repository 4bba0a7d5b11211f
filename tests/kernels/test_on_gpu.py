"""Each Triton kernel against its reference on a GPU: odd shapes, every dtype by its own tolerance, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels.chunk_attention import MERGE_FIELDS, ChunkWork, chunk_attention, queries_a_tile
from kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_ref
from kernels.prefill_attention import prefill_attention, prefill_attention_ref
from kernels.prefill_attention_hopper import QueryTiles
from kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from kernels.rope_kv_write import FLOAT8, rope_kv_write, rope_kv_write_ref
from kernels.silu_mul import silu_mul, silu_mul_ref
from workers.model.chunk_work import ChunkCut
from workers.model.prefill_work import cut_queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the norm of the error, relative to the norm of the reference."""
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: str(dtype).rpartition(".")[2])


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """NaN never passes."""
    got, want = got.float(), want.float()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30)) if want.numel() else 0.0
    assert error <= TOLERANCES[dtype], f"relative error {error:.2e}"


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@dtypes
@pytest.mark.parametrize(
    ("num_tokens", "hidden"), [(0, 64), (1, 8), (5, 123), (7, 576), (3, 4096), (300, 5120)]
)
def test_rms_norm(dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x, residual, weight = (randn(n, hidden, dtype=dtype) for n in (num_tokens, num_tokens, 1))
    want_residual = residual.clone()

    assert_close(rms_norm(x, weight[0], 1e-5), rms_norm_ref(x, weight[0], 1e-5), dtype)
    got = add_rms_norm(x, residual, weight[0], 1e-5)
    want = add_rms_norm_ref(x, want_residual, weight[0], 1e-5)

    assert_close(got, want, dtype)
    assert_close(residual, want_residual, dtype)


@dtypes
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 3), (5, 1536), (33, 14336)])
def test_silu_mul(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = randn(num_tokens, 2 * width, dtype=dtype)

    assert_close(silu_mul(gate_up), silu_mul_ref(gate_up), dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_kv_write(dtype: torch.dtype, head_dim: int, has_norm: bool) -> None:
    num_heads, num_kv_heads, num_tokens, block_size = 6, 2, 37, 16
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.randint(0, 4000, (num_tokens,), device="cuda")
    slots = torch.randperm(9 * block_size, device="cuda")[:num_tokens]
    cos_sin = torch.randn(4000, head_dim, device="cuda")
    norms = randn(2, head_dim, dtype=dtype) if has_norm else (None, None)
    got_cache = torch.zeros(9, 3, 2, num_kv_heads, block_size, head_dim, device="cuda", dtype=dtype)
    want_cache = got_cache.clone()

    got = rope_kv_write(qkv, positions, slots, cos_sin, got_cache, 1, *norms)
    want = rope_kv_write_ref(qkv, positions, slots, cos_sin, want_cache, 1, *norms)

    assert_close(got, want, dtype)
    assert_close(got_cache, want_cache, dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("block_size", "group"), [(16, 4), (32, 1), (64, 7)])
def test_decode_attention(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    group: int,
) -> None:
    context_lens = [1, 0, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 4097]
    _check_decode(make_cache, dtype, head_dim, block_size, group, context_lens)


@pytest.mark.parametrize("context_lens", [[33000], [131072, 5], [1], [40] * 300])
def test_decode_attention_over_long_contexts_and_many_rows(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]], context_lens: list[int]
) -> None:
    _check_decode(make_cache, torch.bfloat16, 128, 16, 4, context_lens)


@pytest.mark.parametrize(("window", "soft_cap"), [(4096, 0.0), (100, 50.0), (0, 30.0), (1, 0.0)])
def test_windows_and_soft_caps(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]], window: int, soft_cap: float
) -> None:
    context_lens, query_lens = [1, 900, 5000, 64, 8000], [1, 900, 200, 0, 8000]
    _check_decode(make_cache, torch.bfloat16, 256, 16, 2, context_lens, window, soft_cap)
    cache, tables = make_cache(context_lens, 2, 16, 128, torch.bfloat16, "cuda")
    q = randn(sum(query_lens), 8, 128, dtype=torch.bfloat16) * 5
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).to(torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")

    got = prefill_attention(q, cache, 1, tables, starts, lens, 0.1, window=window, soft_cap=soft_cap)

    want = prefill_attention_ref(
        q.float(), cache.nan_to_num().float(), 1, tables, starts, lens, 0.1, window, soft_cap
    )
    assert_close(got, want, torch.bfloat16)


def _check_decode(
    make_cache, dtype, head_dim, block_size, group, context_lens, window=0, soft_cap=0.0
) -> None:
    num_kv_heads = 2
    cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype, "cuda")
    q = randn(len(context_lens), num_kv_heads * group, head_dim, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    scale = head_dim**-0.5

    got = paged_decode_attention(q, cache, 1, tables, lens, scale, max(context_lens), window, soft_cap)

    want = torch.cat(
        [
            paged_decode_attention_ref(
                q[i : i + 1].double().float(),
                cache.nan_to_num(),
                1,
                tables[i : i + 1],
                lens[i : i + 1],
                scale,
                window,
                soft_cap,
            )
            for i in range(len(context_lens))
        ]
    )
    assert_close(got, want, dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "block_size"),
    [
        ([1, 0, 5, 64], [1, 3, 21, 64], 16),
        ([200, 3, 129], [200, 1030, 700], 32),
        ([128, 1, 300], [128, 5000, 812], 64),
    ],
)
def test_prefill_attention(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    head_dim: int,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int,
) -> None:
    num_kv_heads, group = 2, 3
    cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype, "cuda")
    q = randn(sum(query_lens), num_kv_heads * group, head_dim, dtype=dtype)
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).to(torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    scale = head_dim**-0.5

    got = prefill_attention(q, cache, 1, tables, starts, lens, scale)
    cut = cut_queries(np.cumsum([0, *query_lens]), np.array(context_lens))
    tiles = QueryTiles(
        torch.tensor(cut, dtype=torch.int32, device="cuda"),
        torch.tensor([len(cut)], dtype=torch.int32, device="cuda"),
    )
    out = torch.full_like(q, float("nan"))
    by_tiles = prefill_attention(q, cache, 1, tables, starts, lens, scale, out, tiles=tiles)

    # On the CPU: torch's own attention on a GPU has larger errors than ours for some masks.
    on_cpu = (x.cpu() for x in (tables, starts, lens))
    want = prefill_attention_ref(q.float().cpu(), cache.nan_to_num().float().cpu(), 1, *on_cpu, scale)
    assert_close(got.cpu(), want, dtype)
    assert_close(by_tiles.cpu(), want, dtype)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([8000], [8000]), ([512] * 40, [512] * 40), ([128, 1, 127, 129] * 20, [9000, 1, 500, 2000] * 20)],
)
def test_prefill_attention_of_long_prompts_and_of_many(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query_lens: list[int],
    context_lens: list[int],
) -> None:
    cache, tables = make_cache(context_lens, 8, 16, 128, torch.bfloat16, "cuda")
    q = randn(sum(query_lens), 32, 128, dtype=torch.bfloat16)
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).to(torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    cut = torch.from_numpy(cut_queries(np.cumsum([0, *query_lens]), np.array(context_lens)))
    tiles = QueryTiles(cut.to("cuda", torch.int32), torch.tensor([len(cut)]).to("cuda", torch.int32))

    plain = prefill_attention(q, cache, 1, tables, starts, lens, 128**-0.5)
    for _ in range(5):
        out = torch.full_like(q, float("nan"))
        got = prefill_attention(q, cache, 1, tables, starts, lens, 128**-0.5, out, tiles=tiles)

        assert_close(got, plain, torch.bfloat16)


@dtypes
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "num_decodes"),
    [
        ([16], [8016], 0),
        ([128], [8128], 0),
        ([32] * 4, [2032, 500, 33, 32], 3),
        ([8] * 16, [4008] * 8 + [8] * 8, 0),
        ([1, 0, 5, 0], [1, 3, 70, 0], 20),
    ],
)
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "soft_cap"),
    [
        *((128, 4, 0, 0.0), (128, 2, 0, 0.0), (128, 8, 0, 0.0), (64, 4, 0, 0.0), (64, 7, 0, 0.0)),
        *((80, 1, 0, 0.0), (128, 4, 1000, 30.0), (256, 2, 0, 50.0)),
    ],
)
def test_chunks_over_long_contexts(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    query_lens: list[int],
    context_lens: list[int],
    num_decodes: int,
    head_dim: int,
    group: int,
    window: int,
    soft_cap: float,
) -> None:
    cache, tables = make_cache(context_lens, 2, 16, head_dim, dtype, "cuda")
    check_chunks(
        cache, tables, dtype, (query_lens, context_lens, num_decodes), group, window=window, soft_cap=soft_cap
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "group", "soft_cap"), [(128, 4, 0.0), (128, 8, 0.0), (64, 7, 0.0), (128, 2, 30.0)]
)
def test_chunks_over_a_cache_of_e4m3(
    make_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    soft_cap: float,
) -> None:
    lens: tuple[list[int], list[int], int] = ([32] * 4, [2032, 500, 33, 32], 3)
    cache, tables = make_cache(lens[1], 2, 16, head_dim, torch.float32, "cuda")
    check_chunks(cache.to(FLOAT8), tables, dtype, lens, group, soft_cap=soft_cap)


def check_chunks(
    cache: torch.Tensor,
    tables: torch.Tensor,
    dtype: torch.dtype,
    lens: tuple[list[int], list[int], int],
    group: int,
    **options: Any,
) -> None:
    """Attend from rows of so many queries, so long contexts, behind so many decoding rows; three times."""
    query_lens, context_lens, num_decodes = lens
    num_kv_heads, head_dim = cache.shape[3], cache.shape[5]
    scale = head_dim**-0.5
    starts = num_decodes + np.cumsum([0, *query_lens])
    end = int(starts[-1])
    way = ChunkCut(queries_a_tile(group), 60, heads_a_processor=1.0, kv_heads_a_processor=1.0)
    cut = way.cut(starts, np.array(context_lens), end)
    assert cut is not None
    # As in a graph: buffers that an earlier step has filled, and tokens of padding.
    told = [torch.full(shape, 10**6, dtype=torch.int32, device="cuda") for shape in way.shapes().values()]
    size = max(128, end)
    told[3] = torch.zeros(size, MERGE_FIELDS, dtype=torch.int32, device="cuda")
    for buffer, part in zip(told, (cut.tiles, cut.items, cut.shares, cut.merges), strict=True):
        buffer[: len(part)] = torch.from_numpy(part).cuda()
    q = randn(size, num_kv_heads * group, head_dim, dtype=dtype) * 2
    on_cpu = (torch.tensor(one, dtype=torch.int32) for one in (starts - num_decodes, context_lens))
    want = torch.full(q.shape, 7.0)
    want[num_decodes:end] = prefill_attention_ref(
        q[num_decodes:end].float().cpu(),
        cache.float().nan_to_num().cpu(),
        1,
        tables.cpu(),
        *on_cpu,
        scale,
        **options,
    )

    for _ in range(3):
        out = torch.full_like(q, 7.0)
        chunk_attention(q, cache, 1, tables, ChunkWork(*told), scale, out, **options)

        assert_close(out[num_decodes:end].cpu(), want[num_decodes:end], dtype)
        assert (out[:num_decodes] == 7.0).all()
        assert (out[end:] == 7.0).all()


def test_attention_beyond_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (2 * 2 * 8 * 16 * 128) + 2
    cache = torch.zeros(num_blocks, 2, 2, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
    cache[-1].normal_()
    tables, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[num_blocks - 1]], [16]))
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    q = randn(1, 32, 128, dtype=torch.bfloat16)

    decoded = paged_decode_attention(q, cache, 1, tables, lens, 128**-0.5, 16)
    prefilled = prefill_attention(q, cache, 1, tables, starts, lens, 128**-0.5)

    want = paged_decode_attention_ref(
        q.float(), cache[-1:].float(), 1, torch.zeros_like(tables), lens, 128**-0.5
    )
    assert_close(decoded, want, torch.bfloat16)
    assert_close(prefilled, want, torch.bfloat16)
