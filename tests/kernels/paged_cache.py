"""Builds paged KV caches for tests."""

from __future__ import annotations

import random

import torch


def make_cache(
    context_lens: list[int],
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of two layers in which every slot that no row holds is poison, and block tables in random order."""
    counts = [-(-length // block_size) for length in context_lens]
    ids = random.Random(0).sample(range(sum(counts) + 1), sum(counts))
    cache = torch.full(
        (sum(counts) + 1, 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device
    )
    tables = torch.zeros(len(context_lens), max(counts, default=0), dtype=torch.int32, device=device)
    for row, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        for index in range(count):
            block = ids.pop()
            tables[row, index] = block
            held = min(block_size, length - index * block_size)
            cache[block, :, :, :, :held] = torch.randn(
                2, 2, num_kv_heads, held, head_dim, dtype=dtype, device=device
            )
    return cache, tables
