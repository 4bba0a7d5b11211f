"""One model on groups of several sizes on this host's GPUs, without Ray: throughput, steps, first tokens, start.

Each figure stands beside the least time that its bytes need, and the share of a step that goes into sums over ranks is
that of the sums alone, timed by the ranks at their start.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from deploy.bench.throughput import StepTime, Throughput, Workload, measure_all, measure_steps
from deploy.offline.llm import LLM
from workers.checkpoint.model_config import ModelConfig
from workers.model.rank_config import LOOPBACK_ENVIRONMENT, RANK_ENVIRONMENT
from workers.model.rendezvous import forget_rendezvous, new_rendezvous

_CONTEXT_LEN = 512
_WEIGHT_BYTES = {None: 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Of one weight of a layer, its scale left out, by what full weights are quantized to at load."""
_NUM_STEPS = 128
"""Steps timed are those of contexts of 512 to 640 tokens."""
LONGEST_STEP = _CONTEXT_LEN + 1 + _NUM_STEPS
"""Tokens of a request whose steps are timed."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step of a group."""

    batch_size: int
    step_ms: float
    floor_ms: float
    """Weights and keys and values of one rank, read once."""
    share_of_floor: float
    reduce_ms: float | None
    """Sums over ranks with the norms that follow them; None for one rank."""
    reduce_share: float | None


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group of one size reached."""

    tensor_parallel_size: int
    start_s: float
    steps: list[DecodeStep]
    first_tokens: list[StepTime]
    throughput: list[Throughput]


def measure_group(
    size: int,
    settings: dict[str, Any],
    config: ModelConfig,
    copy_bytes_per_s: float,
    reduce_us: dict[int, float],
    batch_sizes: Sequence[int],
    input_lens: Sequence[int],
    workloads: Sequence[Workload],
    repeats: int,
) -> GroupResult:
    """Start a group of ``size`` ranks, measure and end it.

    Args:
        settings: further arguments of ``LLM``.
        reduce_us: of one sum over ranks, by rows.
    """
    started_s = time.perf_counter()
    llm = LLM(**settings, tensor_parallel_size=size, skip_tokenizer_init=True)
    start_s = time.perf_counter() - started_s
    try:
        steps = [
            _decode_step(one, size, config, settings["quantization"], copy_bytes_per_s, reduce_us)
            for one in measure_steps(llm, batch_sizes, _CONTEXT_LEN, _NUM_STEPS, llm.vocab_size, repeats)
        ]
        first = [
            one
            for length in input_lens
            for one in measure_steps(llm, [1], length, 0, llm.vocab_size, repeats)
        ]
        reached = measure_all(llm, workloads, llm.vocab_size, 1)
    finally:
        llm.close()
    return GroupResult(size, round(start_s, 2), steps, first, reached)


def measure_reduce(size: int, width: int, dtype: str) -> list[dict[str, Any]]:
    """Time sums over ``size`` ranks by each way, each rank a process that sees its own GPU alone, as under Ray.

    Returns:
        A row for each number of rows: ``ReduceTime`` as a dict.
    """
    context = multiprocessing.get_context("spawn")
    rendezvous = new_rendezvous()
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_time_reduce, args=(rank, size, rendezvous, width, dtype, theirs), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        found: list[dict[str, Any]] = ours.recv()
    finally:
        for process in ranks:
            process.join(30)
            process.kill()
        forget_rendezvous(rendezvous)
    return found


def _time_reduce(rank: int, size: int, rendezvous: str, width: int, dtype: str, pipe: Connection) -> None:
    os.environ.update(RANK_ENVIRONMENT | LOOPBACK_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(rank)})
    import torch

    from workers.model.tensor_parallel import TensorParallelGroup

    group = TensorParallelGroup(rank, size, rendezvous, torch.device("cuda", 0))
    group.prepare(width, getattr(torch, dtype), max_rows=0)
    if rank == 0:
        pipe.send([asdict(one) for one in group.reduce_times])
    group.close()


def _decode_step(
    one: StepTime,
    size: int,
    config: ModelConfig,
    quantization: str | None,
    copy_bytes_per_s: float,
    reduce_us: dict[int, float],
) -> DecodeStep:
    read_bytes = weight_bytes(config, quantization)
    read_bytes += one.batch_size * (_CONTEXT_LEN + _NUM_STEPS / 2) * kv_bytes(config)
    floor_s = read_bytes / size / copy_bytes_per_s
    reduce_ms = None
    if size > 1 and reduce_us:
        rows = min((rows for rows in reduce_us if rows >= one.batch_size), default=max(reduce_us))
        # After attention and after the MLP of each layer; the embeddings' is one more.
        reduce_ms = (2 * config.num_layers + 1) * reduce_us[rows] / 1e3
    return DecodeStep(
        batch_size=one.batch_size,
        step_ms=one.step_ms,
        floor_ms=round(floor_s * 1e3, 3),
        share_of_floor=round(floor_s * 1e3 / one.step_ms, 3),
        reduce_ms=None if reduce_ms is None else round(reduce_ms, 3),
        reduce_share=None if reduce_ms is None else round(reduce_ms / one.step_ms, 3),
    )


def weight_bytes(config: ModelConfig, quantization: str | None = None) -> float:
    """Bytes of weights that a decode step of the whole group reads: layers and head, which keeps 16 bits."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_layers * (attention + mlp) * _WEIGHT_BYTES[quantization]
    return layers + 2 * config.vocab_size * config.hidden_size


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of 16-bit keys and values of one token, all layers and ranks."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
