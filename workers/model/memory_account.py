"""What a device's memory goes to, measured while everything but the KV cache is in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GIB = 2**30
_UNFORESEEN_BYTES = 96 << 20
"""With the real pool in place an H200 holds 70 MiB more than the account says, of two models alike."""


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of one device."""

    total: int
    weights: int
    other: int
    """CUDA itself, loaded kernels, and other processes."""
    graphs: int
    """With the rows of the batch, and what decode steps keep between them."""
    steps: int
    """Of the largest steps: activations, logits, the sampler's copies of them, log-probabilities."""

    def kv_bytes(self, utilization: float) -> int:
        """What is left for the KV cache of that share of the device; negative where it is too little."""
        used = self.weights + self.other + self.graphs + self.steps + _UNFORESEEN_BYTES
        return int(self.total * utilization) - used

    def __str__(self) -> str:
        names = ("weights", "other", "graphs", "steps")
        return ", ".join(f"{name} {getattr(self, name) / _GIB:.2f} GiB" for name in names)


def used_bytes(device: torch.device) -> int:
    """Memory of the device that is not free, whoever holds it."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
