"""Each kernel of a decode step, and prefill attention, against the time that its bytes or operations must take."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import few_rows, gemv
from kernels.chunk_attention import ChunkWork, chunk_attention
from kernels.decode_attention_work import DecodeWork, decode_attention_over_work
from kernels.draw import DrawParams, draw, draw_scratch_len
from kernels.filters import Filters
from kernels.prefill_attention import prefill_attention
from kernels.prefill_attention_hopper import QueryTiles
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from workers.checkpoint.model_config import ModelConfig
from workers.model.attention_work import TILE, cut_contexts
from workers.model.chunk_work import chunk_cut
from workers.model.prefill_work import cut_queries

_REPEATS = 7
_LAYERS = 6
"""Layers of weights and KV that a measurement walks, so that no cache holds what the next one reads."""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel at one size."""

    kernel: str
    size: str
    us: float
    floor_us: float
    """By bytes at the measured copy rate, or by operations at the measured rate of a matrix product."""
    share_of_floor: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches: a large copy, read and written bytes together, and a large bf16 product."""

    tb_per_s: float
    tflop_per_s: float


def measure_ceilings() -> Ceilings:
    """Time a copy of 2 GiB and a product of 8192 x 8192 matrices."""
    source = _random(1 << 30)
    target = torch.empty_like(source)
    # A kernel, not a copy engine: those are slower within a device.
    copy_us = _time([lambda: torch.neg(source, out=target)])
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    matmul_us = _time([lambda: a @ b] * 4)
    return Ceilings(2 * source.nbytes / copy_us / 1e6, 2 * 8192**3 / matmul_us / 1e6)


def measure_kernels(config: ModelConfig, ceilings: Ceilings) -> Iterator[KernelTime]:
    """Time the kernels at a model's shapes in bfloat16, one after the other."""
    yield from _products(config, ceilings)
    for num_rows in (16, 64):
        yield from _products_of_few_rows(config, ceilings, num_rows)
    for num_rows, context in ((1, 576), (1, 8000), (64, 576), (256, 576), (16, 8000)):
        yield _decode_attention(config, ceilings, num_rows, context)
    for num_rows, length in ((1, 512), (1, 2048), (1, 8000), (32, 512)):
        yield _prefill_attention(config, ceilings, num_rows, length)
    for num_rows, num_new, before in ((1, 16, 1000), (1, 16, 8000), (1, 128, 8000), (16, 8, 4000)):
        yield from _chunk_attention(config, ceilings, num_rows, num_new, before)
    for num_rows in (1, 256):
        yield from _small_kernels(config, ceilings, num_rows)


def _products(config: ModelConfig, ceilings: Ceilings) -> Iterator[KernelTime]:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    norm, residual = _random(hidden), _random(1, hidden)
    cases: dict[str, tuple[tuple[int, int], Callable[[Tensor], object]]] = {
        "norm + qkv": ((qkv, hidden), lambda w: gemv.norm_linear(residual, norm, w)),
        "attention out + residual": ((hidden, heads), _adds(residual, heads)),
        "norm + gate, up + SiLU": (
            (2 * config.intermediate_size, hidden),
            lambda w: gemv.norm_gate_up(residual, norm, w),
        ),
        "down + residual": ((hidden, config.intermediate_size), _adds(residual, config.intermediate_size)),
        "norm + logits": ((config.vocab_size, hidden), lambda w: gemv.norm_linear(residual, norm, w)),
    }
    for name, (shape, run) in cases.items():
        weights = [_random(*shape) for _ in range(2 if name == "norm + logits" else _LAYERS)]
        us = _time([functools.partial(run, weight) for weight in weights])
        yield _result(name, "1 row", us, shape[0] * shape[1] * 2 / ceilings.tb_per_s / 1e6)


def _products_of_few_rows(config: ModelConfig, ceilings: Ceilings, num_rows: int) -> Iterator[KernelTime]:
    hidden, heads, width = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    residual, norm = _random(num_rows, hidden), _random(hidden)
    cases: dict[str, tuple[tuple[int, int], Callable[[Tensor, Tensor], object]]] = {
        "attention out in parts + norm": (
            (hidden, heads),
            lambda x, w: few_rows.add_rms_norm_of_parts(few_rows.linear_parts(x, w), residual, norm),
        ),
        "gate, up + SiLU": ((2 * width, hidden), few_rows.few_rows_gate_up),
        "down in parts + norm": (
            (hidden, width),
            lambda x, w: few_rows.add_rms_norm_of_parts(few_rows.linear_parts(x, w), residual, norm),
        ),
        "logits": ((config.vocab_size, hidden), few_rows.few_rows_linear),
    }
    for name, (shape, run) in cases.items():
        x = _random(num_rows, shape[1])
        weights = [_random(*shape) for _ in range(2 if name == "logits" else _LAYERS)]
        if few_rows.fits(weights[0], num_rows):
            us = _time([functools.partial(run, x, weight) for weight in weights])
            yield _result(name, f"{num_rows} rows", us, shape[0] * shape[1] * 2 / ceilings.tb_per_s / 1e6)


def _adds(residual: Tensor, width: int) -> Callable[[Tensor], object]:
    x = _random(1, width)
    return lambda weight: gemv.linear_add(x, weight, residual)


def _decode_attention(config: ModelConfig, ceilings: Ceilings, num_rows: int, context: int) -> KernelTime:
    cache, tables = _paged_cache(config, num_rows, context)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    tiles = np.full(num_rows, -(-context // TILE), dtype=np.int64)
    cut = cut_contexts(
        np.arange(num_rows, dtype=np.int32), tiles, max(processors * 8 // config.num_kv_heads, 1)
    )
    num_slots = len(cut.items)
    work = DecodeWork(
        torch.from_numpy(cut.items).cuda(),
        torch.from_numpy(cut.shares).cuda(),
        torch.full((num_rows,), context - 1, dtype=torch.int32, device="cuda"),
        torch.zeros(num_slots, config.num_heads, config.head_dim, device="cuda"),
        torch.zeros(num_slots, config.num_heads, device="cuda"),
        torch.zeros(num_rows * config.num_kv_heads, dtype=torch.int32, device="cuda"),
    )
    q = _random(num_rows, config.num_heads, config.head_dim)
    us = _time(
        [lambda i=i: decode_attention_over_work(q, cache, i, tables, work, 0.1) for i in range(_LAYERS)]  # type: ignore[misc]
    )
    num_bytes = num_rows * context * 2 * config.num_kv_heads * config.head_dim * 2
    return _result("decode attention", f"{num_rows} x {context}", us, num_bytes / ceilings.tb_per_s / 1e6)


def _prefill_attention(config: ModelConfig, ceilings: Ceilings, num_rows: int, length: int) -> KernelTime:
    cache, tables = _paged_cache(config, num_rows, length)
    q = _random(num_rows * length, config.num_heads, config.head_dim)
    us = _time_prompts(q, cache, tables, np.arange(num_rows + 1) * length, np.full(num_rows, length))
    flop = num_rows * length * length * config.num_heads * config.head_dim * 2
    return _result("prefill attention", f"{num_rows} x {length}", us, flop / ceilings.tflop_per_s / 1e6)


def _time_prompts(
    q: Tensor, cache: Tensor, tables: Tensor, starts: NDArray[np.int64], lens: NDArray[np.int64]
) -> float:
    """Time the attention of prompts whose rows' queries begin at ``starts`` and see ``lens`` tokens."""
    queries = torch.from_numpy(cut_queries(starts, lens))
    tiles = QueryTiles(queries.to("cuda", torch.int32), torch.tensor([len(queries)]).to("cuda", torch.int32))
    starts_, lens_ = (torch.from_numpy(x).to("cuda", torch.int32) for x in (starts, lens))
    attend = functools.partial(prefill_attention, tiles=tiles)
    return _time([lambda i=i: attend(q, cache, i, tables, starts_, lens_, 0.1) for i in range(_LAYERS)])  # type: ignore[misc]


def _chunk_attention(
    config: ModelConfig, ceilings: Ceilings, num_rows: int, num_new: int, before: int
) -> Iterator[KernelTime]:
    """Few new tokens after long contexts: in pieces, where heads fit, and by the kernel of whole prompts."""
    context, num_tokens = before + num_new, num_rows * num_new
    cache, tables = _paged_cache(config, num_rows, context)
    q = _random(num_tokens, config.num_heads, config.head_dim)
    starts, lens = np.arange(num_rows + 1) * num_new, np.full(num_rows, context)
    size = f"{num_rows} x {num_new} after {before}"
    floor_us = num_rows * context * 2 * config.num_kv_heads * config.head_dim * 2 / ceilings.tb_per_s / 1e6
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    way = chunk_cut(config.num_heads, config.num_kv_heads, processors)
    cut = way.cut(starts, lens, num_tokens) if way is not None else None
    if cut is not None:
        work = ChunkWork(
            *(torch.from_numpy(x).cuda() for x in (cut.tiles, cut.items, cut.shares, cut.merges))
        )
        us = _time([lambda i=i: chunk_attention(q, cache, i, tables, work, 0.1) for i in range(_LAYERS)])  # type: ignore[misc]
        yield _result("attention in pieces", size, us, floor_us)
    us = _time_prompts(q, cache, tables, starts, lens)
    yield _result("attention of prompts", size, us, floor_us)


def _small_kernels(config: ModelConfig, ceilings: Ceilings, num_rows: int) -> Iterator[KernelTime]:
    hidden, head_dim = config.hidden_size, config.head_dim
    size, to_us = f"{num_rows} rows", 1 / ceilings.tb_per_s / 1e6
    x, residual, norm = _random(num_rows, hidden), _random(num_rows, hidden), _random(hidden)
    us = _time([lambda: add_rms_norm(x, residual, norm)] * 20)
    yield _result("residual + norm", size, us, 4 * x.numel() * 2 * to_us)
    gate_up = _random(num_rows, 2 * config.intermediate_size)
    us = _time([lambda: silu_mul(gate_up)] * 20)
    yield _result("SiLU * up", size, us, 1.5 * gate_up.numel() * 2 * to_us)
    cache, _ = _paged_cache(config, num_rows, _BLOCK_SIZE)
    qkv = _random(num_rows, (config.num_heads + 2 * config.num_kv_heads) * head_dim)
    positions = torch.arange(num_rows, device="cuda")
    cos_sin = torch.randn(num_rows, head_dim, device="cuda")
    us = _time([lambda: rope_kv_write(qkv, positions, positions * _BLOCK_SIZE, cos_sin, cache, 0)] * 20)
    yield _result("RoPE + KV write", size, us, 2 * qkv.numel() * 2 * to_us)
    logits = _random(num_rows, config.vocab_size)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    ones = torch.ones(num_rows, device="cuda")
    count = torch.tensor([num_rows], dtype=torch.int32, device="cuda")
    token_ids = torch.zeros(num_rows, 512, dtype=torch.int32, device="cuda")
    scratch = torch.zeros(draw_scratch_len(num_rows, config.vocab_size), dtype=torch.float64, device="cuda")
    for name, top_k, top_p in (("draw", 0, 1.0), ("draw, top-p", 0, 0.9), ("draw, top-k, top-p", 20, 0.9)):
        filters = Filters(ones * 0, torch.full_like(rows, top_k), ones * top_p)
        params = DrawParams(ones, positions, rows, filters)
        run = functools.partial(draw, logits, params, count, rows, rows, token_ids, rows.clone(), scratch)
        yield _result(name, size, _time([run] * 5), logits.numel() * 2 * to_us)


def _paged_cache(config: ModelConfig, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
    """A cache of a few layers and block tables in random order."""
    per_row = -(-context // _BLOCK_SIZE)
    shape = (num_rows * per_row, _LAYERS, 2, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    return _random(*shape), torch.randperm(num_rows * per_row).view(num_rows, per_row).to("cuda", torch.int32)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _result(kernel: str, size: str, us: float, floor_us: float) -> KernelTime:
    return KernelTime(kernel, size, round(us, 2), round(floor_us, 2), round(floor_us / us, 3))


def _time(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one call, replayed in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)
