"""What a model and this machine cannot do together, said before anything is started.

A rank would find the same out by itself, after Ray has come up and weights are half loaded: a minute later.
Reads the model's config and the names of its files, no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.settings import ServeSettings
from workers.checkpoint.generic_config import ARCHITECTURE as TRANSFORMERS
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import choose_quantization
from workers.checkpoint.source import DEMO_MODEL, ModelFiles
from workers.checkpoint.vocabulary import load_vocabulary
from workers.engine.errors import InvalidRequest, UnknownModel
from workers.model.sharding import make_shard

_GIB = 1 << 30


def check_cluster(settings: ServeSettings, files: ModelFiles, model: ModelConfig) -> None:
    """Return if replicas of this model can start on this machine, as far as can be told without starting one.

    Raises:
        UserError: what does not fit, with the flag, its value and what is possible.
    """
    check_length(settings, files, model)
    if settings.scripted:
        return
    _check_ranks(settings, files, model)
    choose_quantization(model.quantization, settings.quantization)
    _check_weights(settings, files)
    _check_devices(settings)
    _check_kv_memory(settings, model)
    if files.name != DEMO_MODEL or settings.tokenizer is not None:  # the demo's is known, and takes seconds
        load_vocabulary(text_files(settings, files))


def text_files(settings: ServeSettings, files: ModelFiles) -> ModelFiles:
    """Where tokenizer and chat template are read from."""
    return files if settings.tokenizer is None else ModelFiles(settings.tokenizer.absolute(), files.name)


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


def _check_ranks(settings: ServeSettings, files: ModelFiles, model: ModelConfig) -> None:
    if model.architecture == TRANSFORMERS:
        from workers.model.transformers_decoder import check_architecture

        check_architecture(files.path, model, settings.tensor_parallel_size)
    for rank in range(settings.tensor_parallel_size):
        make_shard(model, rank, settings.tensor_parallel_size)


def _check_weights(settings: ServeSettings, files: ModelFiles) -> None:
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
    missing = _missing_weights(files.path)
    if missing:
        raise UnknownModel(
            f"{files.path} has no {missing}: fetch the model again, or serve random weights with "
            "--load-format dummy",
            "model",
        )


def _missing_weights(folder: Path) -> str:
    """What weights lack in a model folder; empty if they are there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "" if any(folder.glob("*.safetensors")) else ".safetensors file"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise UnknownModel(f"{index} cannot be read: {error}", "model") from error
    lost = sorted(name for name in names if not (folder / name).is_file())
    return f"{lost[0]}, which its index names" if lost else ""


def _check_devices(settings: ServeSettings) -> None:
    if settings.device_name != "cuda":
        return
    import torch

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = settings.replicas * settings.tensor_parallel_size
    if num_devices == 0:
        raise InvalidRequest(
            "--device is cuda, this machine shows no CUDA device: use --device cpu", "device"
        )
    if num_devices < wanted:
        raise InvalidRequest(
            f"{settings.replicas} replicas of {settings.tensor_parallel_size} ranks need {wanted} GPUs, this "
            f"machine has {num_devices}: lower --replicas or --tensor-parallel-size",
            "replicas",
        )


def _check_kv_memory(settings: ServeSettings, model: ModelConfig) -> None:
    """The CPU's pool is known beforehand; a GPU's only once the weights are there."""
    if settings.device_name != "cpu":
        return
    import torch

    from workers.model.device import choose_dtype, choose_kv_dtype, read_cpu_flags
    from workers.model.kv_pool import KVLayout, default_cpu_bytes

    dtype = choose_dtype(settings.dtype, model.dtype, torch.device("cpu"), read_cpu_flags())
    dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype, torch.device("cpu"))
    max_model_len = settings.max_model_len or model.max_position_embeddings
    # The first rank's share is the largest.
    shard = make_shard(model, 0, settings.tensor_parallel_size)
    layout = KVLayout.of(model, shard, settings.block_size, dtype)
    num_bytes = settings.kv_cache_bytes or default_cpu_bytes(layout, settings.step_limits[0], max_model_len)
    num_slots = num_bytes // layout.block_bytes * settings.block_size
    if num_slots < max_model_len:
        shorter = f", or --max-model-len {num_slots}" if num_slots else ""
        needed = -(-max_model_len // settings.block_size) * layout.block_bytes
        raise InvalidRequest(
            f"{num_bytes / _GIB:.3g} GiB of KV memory hold {num_slots} tokens, one request may need "
            f"{max_model_len}: give --kv-cache-gib {needed / _GIB + 0.005:.2f}{shorter}",
            "kv_cache_gib",
        )
