"""What cannot work is said before anything starts, with what would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.preflight import check_cluster
from deploy.settings import make_settings
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with everything but sense in it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


def check(folder: Path, **flags: Any) -> None:
    files = ModelFiles(folder, "tiny")
    check_cluster(make_settings(model=str(folder), device="cpu", **flags), files, read_model_config(files))


def test_what_fits_passes(folder: Path) -> None:
    check(folder, tensor_parallel_size=2)
    check(folder, kv_cache_gib=0.01, max_model_len=64)


@pytest.mark.parametrize(
    ("flags", "param", "says"),
    [
        ({"max_model_len": 4096}, "max_model_len", "takes at most 2048"),
        ({"tensor_parallel_size": 7}, "tensor_parallel_size", "at most 6"),
        ({"load_format": "gguf"}, "load_format", "is a folder"),
        ({"kv_cache_gib": 0.0001}, "kv_cache_gib", "--max-model-len 208"),
        ({"kv_cache_gib": 1e-9}, "kv_cache_gib", "hold 0 tokens"),
        (
            {"num_gpu_blocks_override": 4, "max_model_len": 100},
            "num_gpu_blocks_override",
            "holds 64 tokens.*7 blocks",
        ),
        ({"dtype": "float16"}, "dtype", "float32"),
        ({"quantization": "int3"}, "quantization", "'int3' is unknown; awq"),
        ({"quantization": "awq"}, "quantization", "the checkpoint is not quantized"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_flag_that_does_not_fit_the_model_is_named(
    folder: Path, flags: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check(folder, **flags)

    assert caught.value.param == param


def test_the_advice_for_kv_memory_is_enough(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        check(folder, kv_cache_gib=0.0001)

    advised = float(caught.value.message.split("--kv-cache-gib ")[1].split(",")[0])
    check(folder, kv_cache_gib=advised)


def test_a_gpu_that_is_not_there_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files = ModelFiles(folder, "tiny")

    with pytest.raises(UserError, match="no CUDA device") as caught:
        check_cluster(make_settings(device="cuda"), files, read_model_config(files))

    assert caught.value.param == "device"


def test_too_few_gpus_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    files = ModelFiles(folder, "tiny")
    settings = make_settings(device="cuda", replicas=2, tensor_parallel_size=2)

    with pytest.raises(UserError, match="need 4 GPUs, this machine has 3"):
        check_cluster(settings, files, read_model_config(files))


def test_a_folder_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(UserError, match=r"no \.safetensors file.*--load-format dummy"):
        check(folder)
    check(folder, load_format="dummy")


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(UserError, match=r"no model-2\.safetensors"):
        check(folder)


def test_a_folder_without_a_tokenizer_is_told(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()

    with pytest.raises(UserError, match=r"tokenizer\.json"):
        check(folder)
    shutil.rmtree(folder)
