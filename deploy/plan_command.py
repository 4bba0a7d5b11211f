"""The command ``shoal plan``: a memory plan (``deploy.plan``) for people."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.console import console
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest, UserError


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A folder, a .gguf file or a hub id; none: the demo model.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="H200, H100, A100, ...; or a number of GiB.")] = "H200",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request. (default: the model's most)")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="fp8, int8 or int4, done at load; or as it is stored, the default.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (16 bits) or fp8.")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.1, max=1.0)] = 0.9,
) -> None:
    """Say what a model takes on a GPU, from its config alone: weights, KV cache, requests at once, ranks."""
    from rich.table import Table

    from deploy.model_check import check_ranks
    from deploy.plan import POWERS, fewest_ranks, plan_memory
    from deploy.settings import make_settings
    from workers.checkpoint.model_config import read_model_config
    from workers.checkpoint.quantization import choose_quantization
    from workers.checkpoint.source import resolve_model

    settings = make_settings(model=model, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    files = resolve_model(settings.model, settings.source)
    config = read_model_config(files)
    how = choose_quantization(config.quantization, settings.quantization)
    device_bytes = int(_gib(gpu) * 2**30)
    usable = int(device_bytes * gpu_memory_utilization)
    tokens = context or config.max_position_embeddings
    if tokens > config.max_position_embeddings:
        raise InvalidRequest(
            f"--context is {tokens:,}, the model takes at most {config.max_position_embeddings:,} tokens",
            "context",
        )
    kv_bytes = 2 if settings.kv_cache_dtype == "auto" else 1
    sizes = [size for size in POWERS if _can_share(files, config, size)]
    if not sizes:
        check_ranks(files, config, 1)
    first = fewest_ranks(config, how, usable, tokens, kv_bytes, device_bytes, sizes)
    plans = [first]
    if 2 * first.tensor_parallel_size in sizes:
        plans.append(
            plan_memory(
                config,
                how,
                usable,
                tokens,
                2 * first.tensor_parallel_size,
                kv_bytes_per_element=kv_bytes,
                device_bytes=device_bytes,
            )
        )
    title = f"{files.name} on {gpu}, weights {how.format if how is not None else 'in 16 bits'}"
    table = Table("tensor parallel", *(str(one.tensor_parallel_size) for one in plans), title=title)
    rows = {
        "weights a rank": [f"{one.weight_bytes / 2**30:.2f} GiB" for one in plans],
        "KV a token and rank": [f"{one.kv_bytes_per_token / 2**10:g} KiB" for one in plans],
        "largest step": [f"{one.step_bytes / 2**30:.2f} GiB" for one in plans],
        "KV pool": [f"{one.kv_tokens:,} tokens" for one in plans],
        f"requests of {tokens:,} tokens": [f"{one.max_requests:,}" for one in plans],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def _can_share(files: ModelFiles, config: ModelConfig, num_ranks: int) -> bool:
    from deploy.model_check import check_ranks

    try:
        check_ranks(files, config, num_ranks)
    except UserError:
        return False
    return True


def _gib(gpu: str) -> float:
    from deploy.plan import GPU_GIB

    if gpu.upper() in GPU_GIB:
        return GPU_GIB[gpu.upper()]
    try:
        gib = float(gpu)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 10000:
        raise InvalidRequest(f"GPU {gpu!r} is unknown; {', '.join(GPU_GIB)} are, or give its GiB", "gpu")
    return gib
