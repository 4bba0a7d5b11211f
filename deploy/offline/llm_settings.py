"""Which settings of ``shoal serve`` an ``LLM`` takes as arguments: all that concern model, engine and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict


class LLMSettings(TypedDict, total=False):
    """Names and meanings are those of ``ServeSettings``, where also the defaults and the limits stand."""

    # The model.
    tokenizer: str | Path | None
    revision: str | None
    download_dir: str | Path | None
    load_format: str
    dtype: str
    quantization: str | None
    model_impl: str
    trust_remote_code: bool
    max_model_len: int | None
    seed: int
    cache_dir: str | Path | None
    hub_endpoint: str | None
    offline: bool
    chat_template: str | Path | None
    # The ranks.
    tensor_parallel_size: int
    device: str
    cpu_threads: int | None
    # The engine.
    scheduling_policy: str
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_step_growth: float | None
    enforce_eager: bool
    deterministic: bool
    enable_chunked_prefill: bool
    num_scheduler_steps: int | None
    # Its memory.
    gpu_memory_utilization: float
    kv_cache_gib: float | None
    num_gpu_blocks_override: int | None
    block_size: int
    kv_cache_dtype: str
    enable_prefix_caching: bool
    swap_space: float | None
    preemption_mode: str
    kv_host_fraction: float
    kv_checksum: bool
    copy_gib_per_s: float | None
