"""How the ranks of a group add, gather and share tensors. A group of one does nothing."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.plan import RankLost

_TIMEOUT_S = 60.0
"""A rank silent for so long is lost; the brain's stall clock is faster."""


class TensorParallelGroup:
    """The ranks that hold one model's shards, by NCCL on CUDA and gloo elsewhere.

    Rank 0 samples and broadcasts the token ids: one draw, whatever rounding the ranks' logits would differ by.
    """

    def __init__(self, rank: int, size: int, rendezvous: str | None, device: torch.device) -> None:
        """Meet the other ranks; blocks until all are there."""
        self.rank = rank
        self.size = size
        if size == 1:
            return
        if rendezvous is None:
            raise ValueError(f"a group of {size} ranks needs a rendezvous address")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, in ``x`` itself."""
        if self.size > 1:
            self._run(dist.all_reduce, x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Fill ``x`` on every rank with rank 0's."""
        if self.size > 1:
            self._run(dist.broadcast, x, 0)
        return x

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """Return the ranks' columns side by side; ``widths`` are their numbers, which may differ by rank."""
        if self.size == 1:
            return x
        widest = max(widths)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        self._run(dist.all_gather, parts, padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: object, *args: object) -> None:
        assert callable(collective)
        try:
            collective(*args)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} lost its group: {error}") from error
