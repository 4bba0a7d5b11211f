"""How the ranks of a group add, gather and share tensors. A group of one does nothing.

Sums over ranks end in the same bits on all of them, so that what each computes from them is the same as well.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.all_reduce import PeerMemory, all_reduce, reduce_add_rms_norm
from kernels.rms_norm import add_rms_norm
from workers.engine.plan import RankLost
from workers.model.peer_exchange import PeerExchange, ReduceTime, open_peer_exchange

_TIMEOUT_S = 60.0
"""A rank silent for so long is lost; the brain's stall clock is faster."""
_OVERLAPPED_TOKENS = 4096
"""From so many tokens on, half of them keep tensor cores busy while the other half is on its way between GPUs."""
# Its name from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PendingSum:
    """A sum over ranks under way; ``wait`` does what follows it."""

    def __init__(self, arrive: Callable[[], None], finish: Callable[[], Tensor]) -> None:
        self._arrive = arrive
        self._finish = finish

    def wait(self) -> Tensor:
        """Return what ``TensorParallelGroup.add_rms_norm`` does. On CUDA only the stream waits."""
        self._arrive()
        return self._finish()


class TensorParallelGroup:
    """The ranks that hold one model's shards, by NCCL and memory in common on CUDA, by gloo elsewhere."""

    def __init__(self, rank: int, size: int, rendezvous: str | None, device: torch.device) -> None:
        """Meet the other ranks; blocks until all are there."""
        self.rank = rank
        self.size = size
        self._is_cuda = device.type == "cuda"
        self._exchange: PeerExchange | None = None
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

    def prepare(self, width: int, dtype: torch.dtype) -> None:
        """Find the fastest way to add rows of ``width`` elements. All ranks together, before memory is counted."""
        if self.size == 1 or not self._is_cuda:
            return
        self._run(dist.all_reduce, torch.zeros(1, device="cuda"))  # NCCL takes its memory at its first use
        self._exchange = open_peer_exchange(self.rank, self.size, width, dtype)
        if self._exchange is not None:
            self._exchange.measure(self._add_rms_norm_by)

    @property
    def reduce_times(self) -> list[ReduceTime]:
        """What ``prepare`` measured; empty where NCCL or gloo does it all."""
        return self._exchange.times if self._exchange is not None else []

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, in ``x`` itself."""
        if self.size == 1:
            return x
        peers = self._peers(x)
        if peers is not None:
            return all_reduce(x, peers)
        self._run(dist.all_reduce, x)
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of ``x`` over ranks to ``residual`` in place and return the result normalised.

        Args:
            x: [num_tokens, hidden], this rank's part; not valid afterwards.
            residual: the same shape; the same on all ranks.
            weight: [hidden].
            eps: added to the mean square.
        """
        return self._add_rms_norm_by(x, residual, weight, self._peers(x), eps)

    def overlapped_parts(self, num_tokens: int) -> list[slice] | None:
        """Return the parts of a step's tokens of which one is computed while the other is summed; None: all at once."""
        if self.size == 1 or num_tokens < _OVERLAPPED_TOKENS:
            return None
        half = num_tokens // 2
        return [slice(0, half), slice(half, num_tokens)]

    def start_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> PendingSum:
        """Begin ``add_rms_norm`` into ``out`` and go on meanwhile."""
        works: list[dist.Work] = []
        self._run(lambda: works.append(dist.all_reduce(x, async_op=True)))
        return PendingSum(
            lambda: self._run(works[0].wait), lambda: add_rms_norm(x, residual, weight, eps, out)
        )

    def _add_rms_norm_by(
        self, x: Tensor, residual: Tensor, weight: Tensor, peers: PeerMemory | None, eps: float = 1e-6
    ) -> Tensor:
        if peers is not None:
            return reduce_add_rms_norm(x, residual, weight, eps, peers)
        if self.size > 1:
            self._run(dist.all_reduce, x)
        return add_rms_norm(x, residual, weight, eps)

    def _peers(self, x: Tensor) -> PeerMemory | None:
        """How to add ``x``, if not by NCCL or gloo."""
        return self._exchange.best(x.shape[0]) if self._exchange is not None else None

    def broadcast(self, x: Tensor) -> Tensor:
        """Fill ``x`` on every rank with rank 0's."""
        if self.size > 1:
            self._run(dist.broadcast, x, 0)
        return x

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """Return the ranks' columns side by side; ``widths`` are their numbers, which may differ by rank."""
        if self.size == 1:
            return x
        widest, num_rows = max(widths), x.shape[0]
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        gathered = x.new_empty(self.size * num_rows, widest)
        self._run(_all_gather, gathered, padded)
        parts = gathered.view(self.size, num_rows, widest)
        if min(widths) == widest:
            return parts.transpose(0, 1).reshape(num_rows, -1)
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
