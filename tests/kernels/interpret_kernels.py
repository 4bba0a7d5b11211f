"""Runs each Triton kernel in Triton's interpreter against its reference; prints the largest error of each case as JSON.

A program of its own, since TRITON_INTERPRET must be set before a kernel is decorated. Shapes are tiny: a program of a
kernel takes milliseconds here. No bfloat16: the interpreter computes it wrongly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch
from paged_cache import make_cache

from kernels import paged_decode_attention as decode
from kernels import prefill_attention as prefill
from kernels import rms_norm, rope_kv_write, silu_mul

FLOAT_TYPES = (torch.float32, torch.float16)


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
    for dtype in FLOAT_TYPES:
        yield from norm_cases(dtype)
        yield from rope_cases(dtype)
        yield from decode_cases(dtype)
        yield from prefill_cases(dtype)
        x = torch.randn(3, 2 * 123, dtype=dtype)
        yield f"silu_mul {dtype}", silu_mul._launch(x), silu_mul.silu_mul_ref(x)


def norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """RMSNorm with and without residual."""
    for num_tokens, hidden in ((1, 8), (5, 123)):
        x, residual = torch.randn(2, num_tokens, hidden, dtype=dtype)
        weight = torch.randn(hidden, dtype=dtype)
        name = f"{num_tokens}x{hidden} {dtype}"
        yield (
            f"rms_norm {name}",
            rms_norm._launch(x, None, weight, 1e-5),
            rms_norm.rms_norm_ref(x, weight, 1e-5),
        )
        sum_got, sum_want = residual.clone(), residual.clone()
        got = rms_norm._launch(x, sum_got, weight, 1e-5)
        yield f"add_rms_norm {name}", got, rms_norm.add_rms_norm_ref(x, sum_want, weight, 1e-5)
        yield f"residual {name}", sum_got, sum_want


def rope_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Rotation and KV write, head sizes that are powers of two and not, with and without head norms."""
    for head_dim, has_norm in ((64, False), (80, True)):
        num_heads, num_kv_heads, num_tokens = 3, 1, 4
        qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        positions = torch.tensor([0, 7, 3, 11])
        slots = torch.tensor([5, 40, 17, 63])
        cos_sin = torch.randn(16, head_dim)
        norms = torch.randn(2, head_dim, dtype=dtype) if has_norm else (None, None)
        got, want = torch.zeros(2, 4, 2, 2, num_kv_heads, 16, head_dim, dtype=dtype)
        q_got = rope_kv_write._launch(qkv, positions, slots, cos_sin, got, 1, *norms, 1e-6)
        q_want = rope_kv_write.rope_kv_write_ref(qkv, positions, slots, cos_sin, want, 1, *norms, 1e-6)
        yield f"rope q {head_dim} {dtype}", q_got, q_want
        yield f"rope kv {head_dim} {dtype}", got, want


def decode_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Decode attention: an empty row, one token, partial blocks, and a context of several splits."""
    for head_dim, group, context_lens in ((64, 3, [1, 0, 37]), (80, 1, [20]), (64, 2, [520])):
        block_size, num_kv_heads = 16, 1
        cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype)
        q = torch.randn(len(context_lens), num_kv_heads * group, head_dim, dtype=dtype)
        lens = torch.tensor(context_lens, dtype=torch.int32)
        want = decode.paged_decode_attention_ref(q, cache.nan_to_num(), 1, tables, lens, head_dim**-0.5)
        got = decode._launch(q, cache, 1, tables, lens, head_dim**-0.5, max(context_lens))
        yield f"decode {head_dim} {context_lens} {dtype}", got, want


def prefill_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Prefill attention: whole prompts, a chunk after a prefix, a row without queries."""
    for head_dim, query_lens, context_lens in ((64, [1, 0, 5], [1, 3, 21]), (96, [40], [40])):
        block_size, num_kv_heads, group = 16, 1, 2
        cache, tables = make_cache(context_lens, num_kv_heads, block_size, head_dim, dtype)
        q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, dtype=dtype)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        lens = torch.tensor(context_lens, dtype=torch.int32)
        want = prefill.prefill_attention_ref(q, cache.nan_to_num(), 1, tables, starts, lens, head_dim**-0.5)
        got = prefill._launch(q, cache, 1, tables, starts, lens, head_dim**-0.5)
        yield f"prefill {head_dim} {query_lens} {dtype}", got, want


if __name__ == "__main__":
    main()
