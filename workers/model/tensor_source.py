"""Where weights come from: one tensor at a time, by Hugging Face's name. Pickled checkpoints are refused."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.checkpoint.gguf_file import GgufFile
from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization, check_quantized
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.tensor_names import hf_name
from workers.checkpoint.weight_files import stored_tensors
from workers.engine.errors import UserError
from workers.model.quantized.gguf_blocks import read_codes
from workers.model.quantized.stored_weight import CodedWeight, DenseWeight, StoredWeight

_DUMMY_SCALE = 0.02
"""Standard deviation of random weights: that of GPT-2's initialisation."""
_CODE_DEVIATION = 6.5
"""Standard deviation of the difference of two random 4-bit codes, as random zero points make it."""
_QUANTIZED_LAYER = {"qweight", "lookup_table", "weight_scale", "weight_packed", "SCB"}


class TensorSource(Protocol):
    """Gives out whole tensors; whoever asks keeps its shard."""

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return tensor ``name`` on the CPU or on the model's device.

        Args:
            name: Hugging Face's.
            shape: what it must have; None: any.
            dtype: what it must have; None: any floating one.

        Raises:
            UserError: it is missing, or has another shape or dtype.
        """
        ...

    def has(self, name: str) -> bool:
        """True if there is such a tensor."""
        ...

    def read_blocks(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        """Return a matrix in the encoding that its file gives it, where that says so itself (GGUF).

        Raises:
            UserError: as ``read``.
        """
        ...


def open_source(
    files: ModelFiles | None,
    load_format: str,
    config: ModelConfig,
    how: Quantization | None,
    seed: int,
    device: torch.device,
) -> TensorSource:
    """Choose the source that ``load_format`` names, or that fits ``files`` where it is "auto".

    Raises:
        UserError: there is none such, or its layers are not stored as ``how`` says.
    """
    if load_format == "dummy":
        return DummySource(seed, device)
    if files is None:
        raise UserError(f"load format {load_format!r} needs a model", "model")
    if load_format == "auto":
        load_format = "safetensors" if files.path.is_dir() else "gguf"
    if load_format == "gguf":
        return GgufSource(files.path, config)
    if load_format == "safetensors":
        source = SafetensorsSource(files.path)
        check_quantized(how, source.names, str(files.path))
        return source
    raise UserError(
        f"load format {load_format!r} is unknown; auto, gguf, safetensors and dummy are", "load_format"
    )


class GgufSource:
    """Tensors of a GGUF file: as its blocks hold them, or dequantized to float32."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Open ``path``."""
        self._file = GgufFile(path)
        self._names = {hf_name(name, config.has_post_norms): name for name in self._file.shapes}
        # llama.cpp's converter interleaves the halves of q and k heads for this architecture alone.
        self._interleaved_heads = (
            {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            if config.architecture == "llama"
            else {}
        )

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        """See ``TensorSource``."""
        tensor = torch.tensor(self._file.read(self._own_name(name)))
        check_tensor(name, tensor, shape, dtype)
        order = self._row_order(name, tensor.shape[0])
        return tensor if order is None else tensor[order]

    def has(self, name: str) -> bool:
        """See ``TensorSource``."""
        return name in self._names

    def read_blocks(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``TensorSource``."""
        own_name = self._own_name(name)
        codes = None
        if self._file.shapes[own_name] == shape:
            codes = read_codes(*self._file.blocks(own_name), *shape)
        if codes is None:
            return DenseWeight(self.read(name, shape))
        weight = CodedWeight(codes)
        order = self._row_order(name, shape[0])
        return weight if order is None else weight.reorder_rows(order)

    def _own_name(self, name: str) -> str:
        if name not in self._names:
            raise UserError(f"{self._file.path} has no tensor {name}")
        return self._names[name]

    def _row_order(self, name: str, num_rows: int) -> Tensor | None:
        """Where each row of Hugging Face's order lies; None: where it is."""
        num_heads = self._interleaved_heads.get(name.split(".")[-2])
        if num_heads is None:
            return None
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


class SafetensorsSource:
    """Tensors of a Hugging Face folder, from whichever shard holds them."""

    def __init__(self, folder: Path) -> None:
        """Read the headers in ``folder``; see ``stored_tensors``."""
        self._stored = stored_tensors(folder)
        self._folder = folder

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._stored.keys()

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        """See ``TensorSource``."""
        if name not in self._stored:
            raise UserError(f"{self._folder} has no tensor {name}", "model")
        path = self._stored[name].path
        try:
            with safe_open(path, framework="pt") as shard:
                tensor: Tensor = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is damaged or cut off ({error}): fetch it again", "model") from error
        check_tensor(name, tensor, shape, dtype)
        return tensor

    def has(self, name: str) -> bool:
        """See ``TensorSource``."""
        return name in self._stored

    def read_blocks(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``TensorSource``."""
        return DenseWeight(self.read(name, shape))


class DummySource:
    """Random weights that depend on the tensor's name alone, so that ranks agree on what they share."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Draw with ``seed`` on ``device``."""
        self._seed = seed
        self._device = device

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        """See ``TensorSource``."""
        if shape is None:
            return torch.ones((), device=self._device)
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        if name.endswith("scales"):
            return torch.full(shape, _DUMMY_SCALE / _CODE_DEVIATION, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) + self._seed)
        if dtype is not None and not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            return torch.randint(
                limits.min, limits.max, shape, generator=generator, device=self._device, dtype=dtype
            )
        values = torch.randn(shape, generator=generator, device=self._device).mul_(_DUMMY_SCALE)
        return values if dtype is None or dtype.itemsize > 1 else values.to(dtype)

    def has(self, name: str) -> bool:
        """What a quantized layer must have is there; what it may have is not, nor is the head quantized."""
        stem, _, kind = name.rpartition(".")
        return kind in _QUANTIZED_LAYER and stem != "lm_head"

    def read_blocks(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        """See ``TensorSource``."""
        return DenseWeight(self.read(name, shape))


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> None:
    """Return if ``tensor`` is as ``TensorSource.read`` was asked for it.

    Raises:
        UserError: it is not.
    """
    if shape is not None and tuple(tensor.shape) != shape:
        raise UserError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the model's config asks for {shape}", "model"
        )
    # Scales are kept in several floating types, and small integers sometimes in 64 bits.
    is_right = (
        tensor.is_floating_point() or not shape
        if dtype is None
        else tensor.dtype == dtype
        or (dtype.itemsize > 1 and dtype.is_floating_point == tensor.is_floating_point())
    )
    if not is_right:
        raise UserError(f"tensor {name} holds {tensor.dtype}, {dtype or 'a floating type'} was expected")
