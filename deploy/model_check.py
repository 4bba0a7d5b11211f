"""What a model and the settings it is run with cannot do together, said before any rank is started.

Ranks would find the same out by themselves, when weights are half loaded. Reads the model's config and the headers of
its files, no weights.
"""

from __future__ import annotations

import os

from deploy.settings import ServeSettings
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization, check_quantized, choose_quantization
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.weight_files import stored_tensors
from workers.engine.errors import InvalidRequest

_GIB = 1 << 30


def check_model(settings: ServeSettings, files: ModelFiles, model: ModelConfig) -> None:
    """Return if ranks of this model can start on this machine, as far as can be told without starting one.

    Raises:
        UserError: what does not fit, with the setting, its value and what is possible.
    """
    if settings.preemption_mode == "swap" and not settings.swap_space_bytes:
        raise InvalidRequest(
            "--preemption-mode is swap and there is no memory to swap to: give --swap-space (GiB)",
            "preemption_mode",
        )
    _check_devices(settings)
    if settings.copy_gib_per_s is not None and settings.device_name == "cuda":
        raise InvalidRequest(
            f"--copy-gib-per-s is {settings.copy_gib_per_s:g}, it is for a CPU: a GPU's copies take the time that they "
            "take, leave it out",
            "copy_gib_per_s",
        )
    check_length(settings, files, model)
    check_ranks(files, model, settings.tensor_parallel_size)
    how = choose_quantization(model.quantization, settings.quantization)
    if how is not None and how.is_online and how.group_size is not None:
        _check_groups(model, how.group_size)
    _check_weights(settings, files, model, how)
    if settings.device_name == "cpu":
        _check_threads(settings)
        _check_kv_memory(settings, model)
    else:
        from workers.model.host_memory import check_host_memory

        check_host_memory(0, settings.swap_space_bytes, settings.num_ranks)


def _check_devices(settings: ServeSettings) -> None:
    if settings.device_name != "cuda":
        return
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = settings.num_ranks
    if num_devices == 0:
        raise InvalidRequest(
            "--device is cuda, this machine shows no CUDA device: use --device cpu", "device"
        )
    if num_devices >= wanted:
        return
    if settings.replicas == 1:
        raise InvalidRequest(
            f"--tensor-parallel-size {wanted} needs {wanted} GPUs, this machine has {num_devices}: lower it",
            "tensor_parallel_size",
        )
    raise InvalidRequest(
        f"{settings.replicas} replicas of {settings.tensor_parallel_size} ranks need {wanted} GPUs, this "
        f"machine has {num_devices}: lower --replicas or --tensor-parallel-size",
        "replicas",
    )


def check_length(settings: ServeSettings, files: ModelFiles, model: ModelConfig) -> None:
    """Return if the longest request wanted fits the model and the blocks wanted.

    Raises:
        InvalidRequest: it does not.
    """
    longest = model.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise InvalidRequest(
            f"--max-model-len is {settings.max_model_len}, {files.name} takes at most {longest} tokens",
            "max_model_len",
        )
    override = settings.num_gpu_blocks_override
    if override is not None and settings.max_model_len is not None:
        num_slots = override * settings.block_size
        if num_slots < settings.max_model_len:
            raise InvalidRequest(
                f"--num-gpu-blocks-override {override} holds {num_slots} tokens, one request may need "
                f"--max-model-len {settings.max_model_len}: lower it or give "
                f"{-(-settings.max_model_len // settings.block_size)} blocks",
                "num_gpu_blocks_override",
            )


def check_ranks(files: ModelFiles, model: ModelConfig, num_ranks: int) -> None:
    """Return if so many ranks can share the model.

    Raises:
        UserError: they cannot, or transformers' layers are needed and cannot be used.
    """
    from workers.model.sharding import make_shard

    if model.architecture == TRANSFORMERS:
        from workers.model.transformers_decoder import check_architecture

        check_architecture(files.path, model, num_ranks)
    for rank in range(num_ranks):
        make_shard(model, rank, num_ranks)


def _check_weights(
    settings: ServeSettings, files: ModelFiles, model: ModelConfig, how: Quantization | None
) -> None:
    if settings.load_format == "dummy":
        return
    if settings.load_format == "gguf" and not files.is_gguf:
        raise InvalidRequest(f"--load-format is gguf, {files.path} is a folder: leave it out", "load_format")
    if files.is_gguf:
        if settings.load_format == "safetensors":
            raise InvalidRequest(
                f"--load-format is safetensors, {files.path} is a GGUF file: leave it out", "load_format"
            )
        return
    stored = stored_tensors(files.path)
    check_quantized(how, stored, str(files.path))
    if model.architecture != TRANSFORMERS and model.quantization is None:
        from workers.model.stored_shapes import check_shapes

        check_shapes(model, stored, files.path)


def _check_groups(model: ModelConfig, size: int) -> None:
    """Quantizing to int4 at load: weights whose width is no multiple would stay as they are."""
    for key, width in model.input_widths.items():
        if width % size:
            raise InvalidRequest(
                f"--quantization int4 takes widths that are multiples of {size}, {key} is {width}: take int8",
                "quantization",
            )


def _check_threads(settings: ServeSettings) -> None:
    threads, cores = settings.cpu_threads, os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise InvalidRequest(
            f"--cpu-threads is {threads}, this machine has {cores} cores: more threads than cores only wait for each "
            f"other, give {cores} at most",
            "cpu_threads",
        )


def _check_kv_memory(settings: ServeSettings, model: ModelConfig) -> None:
    """The CPU's pool is known beforehand; a GPU's only once the weights are there."""
    import torch

    from workers.model.device import choose_dtype, choose_kv_dtype, read_cpu_flags
    from workers.model.host_memory import check_host_memory
    from workers.model.kv_pool import KVLayout, default_cpu_bytes
    from workers.model.sharding import make_shard

    dtype = choose_dtype(settings.dtype, model.dtype, torch.device("cpu"), read_cpu_flags())
    dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype, torch.device("cpu"))
    # The first rank's share is the largest.
    shard = make_shard(model, 0, settings.tensor_parallel_size)
    layout = KVLayout.of(model, shard, settings.block_size, dtype)
    max_model_len = settings.max_model_len or model.max_position_embeddings
    wanted, num_bytes = settings.num_gpu_blocks_override, settings.kv_cache_bytes
    if num_bytes is None:
        num_bytes = (
            default_cpu_bytes(layout, settings.step_limits[0], max_model_len)
            if wanted is None
            else wanted * layout.block_bytes
        )
    names_blocks = wanted is not None and settings.kv_cache_bytes is None
    kv_setting = "num_gpu_blocks_override" if names_blocks else "kv_cache_gib"
    check_host_memory(num_bytes, settings.swap_space_bytes, settings.num_ranks, kv_setting)
    num_blocks = num_bytes // layout.block_bytes
    if wanted is not None:
        if wanted > num_blocks:
            raise InvalidRequest(
                f"--num-gpu-blocks-override is {wanted:,}, --kv-cache-gib {num_bytes / _GIB:.3g} holds {num_blocks:,} "
                f"blocks of {layout.block_bytes / 2**20:.3g} MiB: leave one of the two out",
                "num_gpu_blocks_override",
            )
        return
    num_slots = num_blocks * settings.block_size
    if num_slots < max_model_len:
        shorter = f", or --max-model-len {num_slots}" if num_slots >= 2 else ""
        needed = -(-max_model_len // settings.block_size) * layout.block_bytes
        raise InvalidRequest(
            f"{num_bytes / _GIB:.3g} GiB of KV memory hold {num_slots} tokens, one request may need "
            f"{max_model_len}: give --kv-cache-gib {needed / _GIB + 0.005:.2f}{shorter}",
            "kv_cache_gib",
        )
