"""Where weights come from: one tensor at a time, by Hugging Face's name. Pickled checkpoints are refused."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.tensor_names import hf_name
from workers.engine.errors import UserError

_DUMMY_SCALE = 0.02
"""Standard deviation of random weights: that of GPT-2's initialisation."""


class TensorSource(Protocol):
    """Gives out whole tensors; whoever asks keeps its shard."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return tensor ``name`` on the CPU or on the model's device, in any floating dtype.

        Raises:
            UserError: it is missing or has another shape.
        """
        ...


def open_source(
    files: ModelFiles | None, load_format: str, config: ModelConfig, seed: int, device: torch.device
) -> TensorSource:
    """Choose the source that ``load_format`` names, or that fits ``files`` where it is "auto"."""
    if load_format == "dummy":
        return DummySource(seed, device)
    if files is None:
        raise UserError(f"load format {load_format!r} needs a model", "model")
    if load_format == "auto":
        load_format = "safetensors" if files.path.is_dir() else "gguf"
    if load_format == "gguf":
        return GgufSource(files.path, config)
    if load_format == "safetensors":
        return SafetensorsSource(files.path)
    raise UserError(
        f"load format {load_format!r} is unknown; auto, gguf, safetensors and dummy are", "load_format"
    )


class GgufSource:
    """Tensors of a GGUF file, dequantized to float32."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Open ``path``."""
        self._file = GgufFile(path)
        self._names = {hf_name(name): name for name in self._file.shapes}
        # llama.cpp's converter interleaves the halves of q and k heads for this architecture alone.
        self._interleaved_heads = (
            {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            if config.architecture == "llama"
            else {}
        )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``TensorSource``."""
        if name not in self._names:
            raise UserError(f"{self._file.path} has no tensor {name}")
        tensor = torch.tensor(self._file.read(self._names[name]))
        _check_shape(name, tensor, shape)
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        if num_heads is None:
            return tensor
        return (
            tensor.view(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)
        )


class SafetensorsSource:
    """Tensors of a Hugging Face folder, from whichever shard holds them."""

    def __init__(self, folder: Path) -> None:
        """Read the index of ``folder``, or the header of its only file."""
        index = folder / "model.safetensors.index.json"
        if index.exists():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._places = {name: folder / file for name, file in shards.items()}
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                pickled = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
                hint = f" ({pickled[0]} is pickled, which can run code: it is not read)" if pickled else ""
                raise UserError(f"{folder} holds no .safetensors file{hint}")
            self._places = {}
            for path in paths:
                with safe_open(path, framework="pt") as shard:
                    self._places.update(dict.fromkeys(shard.keys(), path))
        self._folder = folder

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``TensorSource``."""
        if name not in self._places:
            raise UserError(f"{self._folder} has no tensor {name}")
        with safe_open(self._places[name], framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
        _check_shape(name, tensor, shape)
        return tensor


class DummySource:
    """Random weights that depend on the tensor's name alone, so that ranks agree on what they share."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Draw with ``seed`` on ``device``."""
        self._seed = seed
        self._device = device

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``TensorSource``."""
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        return torch.randn(shape, generator=generator, device=self._device).mul_(_DUMMY_SCALE)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UserError(f"tensor {name} has shape {tuple(tensor.shape)}, the model's config asks for {shape}")
