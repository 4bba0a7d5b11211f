"""Sees from headers alone whether a folder has every tensor that its config asks for, in the right shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.weight_files import StoredTensor
from workers.engine.errors import UserError
from workers.model.quantized.stored_weight import DenseWeight, StoredWeight
from workers.model.shard_loader import ShardLoader
from workers.model.sharding import make_shard
from workers.model.tensor_source import check_tensor

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the format's names."""
_NOT_READ = ("inv_freq", "k_scale", "v_scale")
"""Numbers that follow from the config, and scales of an 8-bit KV cache."""


def check_shapes(config: ModelConfig, stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Do what loading full weights does, but without their numbers.

    Raises:
        UserError: a tensor is missing, has another shape or type than the config says, or belongs to a layer and
            would not be read; it is named.
    """
    nowhere = torch.device("meta")
    shard = make_shard(config, 0, 1)
    headers = _Headers(stored, folder)
    loader = ShardLoader(config, shard, 0, 1, headers, None, nowhere, torch.float32)
    embedding = loader.embedding()
    for index in range(config.num_layers):
        loader.layer(index)
    loader.norm("model.norm.weight", config.hidden_size)
    loader.head(embedding)
    leftover = sorted(
        name for name in stored if name.startswith("model.layers.") and not name.endswith(_NOT_READ)
    )
    leftover = [name for name in leftover if name not in headers.names]
    if leftover:
        raise UserError(
            f"{folder} has {len(leftover)} tensors for which the model of its config.json has no place, such as "
            f"{leftover[0]}: its text would be another model's; mend config.json, or merge what was added",
            "model",
        )


class _Headers:
    """A ``TensorSource`` of tensors that have a shape and no numbers."""

    def __init__(self, stored: Mapping[str, StoredTensor], folder: Path) -> None:
        self._stored = stored
        self._folder = folder
        self.names: set[str] = set()
        """Of all that was read."""

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._stored:
            raise UserError(f"{self._folder} has no tensor {name}", "model")
        self.names.add(name)
        stored = self._stored[name]
        if stored.dtype not in _DTYPES:
            raise UserError(
                f"tensor {name} of {self._folder} holds {stored.dtype}, which nothing reads", "model"
            )
        tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype], device="meta")
        check_tensor(name, tensor, shape, dtype)
        return tensor

    def has(self, name: str) -> bool:
        # Scales of an 8-bit KV cache are numbers, not shapes.
        return name in self._stored and not name.endswith(("k_scale", "v_scale"))

    def read_blocks(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        return DenseWeight(self.read(name, shape))
