"""Runs the attention of few new tokens in Triton's interpreter against its reference, as ``interpret_kernels`` does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from paged_cache import make_cache

from kernels import chunk_attention as chunk
from kernels.prefill_attention import prefill_attention_ref
from kernels.rope_kv_write import FLOAT8
from workers.model.chunk_work import ChunkArrays, ChunkCut

OPTIONS = ((0, 0.0), (40, 0.0), (10, 0.8), (0, 0.8))
"""Windows and soft caps."""
SHAPES = (
    # Query heads of each KV head, head size, new tokens and contexts of rows, decoding rows, programs a KV head.
    (4, 64, [1, 0, 20, 5], [1, 3, 300, 133], 0, 5),
    (3, 64, [40], [40], 2, 9),
    (1, 64, [70, 2], [200, 64], 1, 3),
    (5, 80, [13], [213], 0, 1),
    # More pieces than the merge reads at once.
    (2, 256, [3], [1100], 1, 20),
)


def main() -> None:
    """Print ``{case: error}``, the error relative to the reference's largest value."""
    torch.manual_seed(0)
    errors = {
        name: float((got.float() - want.float()).abs().max() / want.float().abs().max())
        for name, got, want in cases()
    }
    print(json.dumps(errors))


def cases() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, the kernel's result, the reference's."""
    for dtype in (torch.float32, torch.float16):
        for group, head_dim, query_lens, context_lens, num_decodes, num_shares in SHAPES:
            cache, tables = make_cache(context_lens, 2, 16, head_dim, dtype)
            for window, soft_cap in OPTIONS if group == 4 else OPTIONS[:1]:
                shape = (group, head_dim, query_lens, context_lens, num_decodes, num_shares)
                got, want = attended(cache, tables, dtype, shape, window, soft_cap)
                yield f"chunks {shape} {window} {soft_cap} {dtype}", got, want
    group, head_dim, query_lens, context_lens, *_ = SHAPES[0]
    cache, tables = make_cache(context_lens, 2, 16, head_dim, torch.float32)
    got, want = attended(cache.to(FLOAT8), tables, torch.float32, SHAPES[0])
    yield f"chunks of e4m3 {torch.float32}", got, want


def attended(
    cache: torch.Tensor,
    tables: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, int, list[int], list[int], int, int],
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel leaves among tokens that decode and padding, and what it ought to."""
    group, head_dim, query_lens, context_lens, num_decodes, num_shares = shape
    starts = num_decodes + np.cumsum([0, *query_lens])
    num_tokens = int(starts[-1])
    cut = ChunkCut(chunk.queries_a_tile(group), num_shares, heads_a_processor=1.0, kv_heads_a_processor=1.0)
    arrays = cut.cut(starts, np.array(context_lens), num_tokens)
    assert arrays is not None
    work = padded(arrays, num_tokens + 3)
    q = torch.randn(num_tokens + 3, 2 * group, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    want, got = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    told = (torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32), torch.tensor(context_lens).int())
    kept = torch.where(cache.float().isnan(), 0, cache.float())
    want[num_decodes:num_tokens] = prefill_attention_ref(
        q[num_decodes:num_tokens].float(), kept, 1, tables, *told, scale, window, soft_cap
    ).to(dtype)
    chunk._launch(q, cache, 1, tables, work, scale, got, window, soft_cap)
    return got, want


def padded(arrays: ChunkArrays, num_tokens: int) -> chunk.ChunkWork:
    """As a graph's buffers: longer than what is used, and what an earlier step has left stands behind."""
    tiles, items = (np.concatenate((one, one[::-1] + 99)) for one in (arrays.tiles, arrays.items))
    merges = np.concatenate((arrays.merges, np.zeros((num_tokens - len(arrays.merges), 4), dtype=np.int32)))
    return chunk.ChunkWork(*map(torch.from_numpy, (tiles, items, arrays.shares, merges)))


if __name__ == "__main__":
    main()
