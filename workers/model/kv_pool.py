"""How many KV blocks a rank's memory holds, and the tensor that is them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.checkpoint.model_config import ModelConfig
from workers.engine.errors import UserError
from workers.model.sharding import Shard

_CPU_BYTES = 1 << 30
"""KV memory of a rank on a CPU unless told otherwise."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a rank's cache: block-major, so that all layers of a block are one piece of memory."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard, block_size: int, dtype: torch.dtype) -> KVLayout:
        """The layout of one rank of a model."""
        return cls(config.num_layers, len(shard.kv_heads), block_size, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return zeros [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        try:
            if device.type == "cpu":
                # numpy's zeros are pages that the kernel provides on first use, torch's are written at once.
                flat = torch.from_numpy(np.zeros(num_blocks * self.block_bytes, dtype=np.uint8))
                return flat.view(self.dtype).view(shape)
            return torch.zeros(shape, dtype=self.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            gib = num_blocks * self.block_bytes / 2**30
            raise UserError(
                f"no memory for {num_blocks} KV blocks ({gib:.1f} GiB)", "kv_cache_gib"
            ) from error


def default_cpu_bytes(layout: KVLayout, max_num_seqs: int, max_model_len: int) -> int:
    """KV memory on a CPU when no size was asked for."""
    most = max_num_seqs * -(-max_model_len // layout.block_size) * layout.block_bytes
    return min(_CPU_BYTES, most)


def cuda_bytes(gpu_memory_utilization: float, device: torch.device, step_peak_bytes: int) -> int:
    """KV memory that the utilization leaves beside what the device holds now and the largest step adds."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    used = total - free - cached
    return int(total * gpu_memory_utilization) - used - step_peak_bytes
