"""How the ranks of a group add, gather and share tensors. A group of one does nothing.

Sums over ranks end in the same bits on all of them, so that what each computes from them is the same as well.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.all_reduce import (
    PeerMemory,
    all_reduce,
    reduce_add_rms_norm,
    reduce_add_rms_norm_of_parts,
)
from kernels.few_rows import add_rms_norm_of_parts
from kernels.rms_norm import add_rms_norm
from kernels.vocab_shard import VocabShard, WholeVocab
from workers.engine.errors import RankLost
from workers.model.peer_copies import PeerCopies, open_peer_copies
from workers.model.peer_exchange import PeerExchange, ReduceTime, open_peer_exchange

_TIMEOUT_S = 60.0
"""After so long NCCL and gloo give up a sum. Whoever watches the ranks ends a group far sooner."""
_OVERLAPPED_TOKENS = 4096
"""From so many tokens on, some of them keep tensor cores busy while others are on their way between GPUs."""
_NUM_PARTS = 2
"""Of such a step: the last part's sum hides behind the next layer's first product. More parts gain nothing, and NCCL's
kernels, which take multiprocessors from the products, then cost more."""
# Its name from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


PendingRows = Callable[[], Tensor]
"""Normalised rows to come: called, it waits for the sum over ranks that they are made of and returns them. On CUDA only
the stream waits."""
_T = TypeVar("_T")


class TensorParallelGroup:
    """The ranks that hold one model's shards, by NCCL and memory in common on CUDA, by gloo elsewhere."""

    def __init__(self, rank: int, size: int, rendezvous: str | None, device: torch.device) -> None:
        """Meet the other ranks; blocks until all are there."""
        self.rank = rank
        self.size = size
        self._is_cuda = device.type == "cuda"
        self._exchange: PeerExchange | None = None
        self._copies: PeerCopies | None = None
        self._host_group: dist.ProcessGroup | None = None
        """Of gloo beside NCCL, once ranks have had to agree on the host."""
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

    def prepare(self, width: int, dtype: torch.dtype, max_rows: int, is_deterministic: bool = False) -> None:
        """Find the fastest way to add rows of ``width`` elements. All ranks together, before memory is counted.

        Args:
            width: of the residual.
            dtype: of the residual.
            max_rows: tokens of the largest step that is computed in parts; 0: none is.
            is_deterministic: NCCL adds any number of rows; it rounds a sum before the residual is added, the other
                ways do not.
        """
        if self.size == 1 or not self._is_cuda:
            return
        self._run(dist.all_reduce, torch.zeros(1, device="cuda"))  # NCCL takes its memory at its first use
        if is_deterministic:
            return
        self._exchange = open_peer_exchange(self.rank, self.size, width, dtype)
        if self._exchange is not None:
            self._exchange.measure(self._add_rms_norm_by)
            if self.size == 2 and max_rows >= _OVERLAPPED_TOKENS:
                self._copies = open_peer_copies(self.rank, -(-max_rows // _NUM_PARTS), width, dtype)

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

    def add_rms_norm_of_parts(self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Do what ``add_rms_norm`` does with the sum of ``parts`` [parts, num_tokens, hidden] float32."""
        if self.size == 1:
            return add_rms_norm_of_parts(parts, residual, weight, eps)
        peers = self._peers(residual)
        if peers is not None:
            return reduce_add_rms_norm_of_parts(parts, residual, weight, eps, peers)
        return self.add_rms_norm(parts.sum(0).to(residual.dtype), residual, weight, eps)

    def overlapped_parts(self, num_tokens: int) -> list[slice] | None:
        """Return the parts of a step's tokens of which one is computed while the other is summed; None: all at once."""
        if self.size == 1 or num_tokens < _OVERLAPPED_TOKENS:
            return None
        length = -(-num_tokens // _NUM_PARTS)
        return [slice(start, min(start + length, num_tokens)) for start in range(0, num_tokens, length)]

    def start_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> PendingRows:
        """Begin ``add_rms_norm`` and go on meanwhile. All ranks must start and await their sums in one order."""
        if self._copies is not None and x.shape[0] <= self._copies.max_rows:
            return partial(self._run, self._run(self._copies.start, x, residual, weight, eps))
        work = self._run(lambda: dist.all_reduce(x, async_op=True))
        assert work is not None, "this rank is one of the group"

        def wait() -> Tensor:
            self._run(work.wait)
            return add_rms_norm(x, residual, weight, eps)

        return wait

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

    def highest(self, x: Tensor) -> Tensor:
        """Return the highest of the ranks' ``x``, elementwise."""
        if self.size > 1:
            x = x.clone()
            self._run(lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return [ranks, *shape] of the ranks' ``x``, contiguous and of one shape."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._run(_all_gather, gathered, x)
        return gathered.view(self.size, *x.shape)

    def all_agree(self, flags: list[bool]) -> list[bool]:
        """Return where all ranks' ``flags`` are true; by way of the host, no device waits."""
        if self.size == 1:
            return flags
        if self._is_cuda and self._host_group is None:
            self._host_group = dist.new_group(backend="gloo")
        told = torch.tensor(flags, dtype=torch.int32)
        self._run(lambda: dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self._host_group))
        return [bool(flag) for flag in told.tolist()]

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: Callable[..., _T], *arguments: object) -> _T:
        try:
            return collective(*arguments)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} lost its group: {error}") from error


class SharedVocab:
    """A ``VocabShard`` of the ranks of a group."""

    def __init__(self, group: TensorParallelGroup, parts: list[range]) -> None:
        """Take each rank's tokens, in rank order."""
        self._group = group
        self._parts = parts

    @property
    def own(self) -> range:
        """See ``VocabShard``."""
        return self._parts[self._group.rank]

    @property
    def size(self) -> int:
        """See ``VocabShard``."""
        return self._parts[-1].stop

    def highest(self, values: Tensor) -> Tensor:
        """See ``VocabShard``."""
        return self._group.highest(values)

    def side_by_side(self, columns: Tensor) -> Tensor:
        """See ``VocabShard``."""
        return self._group.gather(columns).transpose(0, 1).flatten(1)

    def whole(self, columns: Tensor) -> Tensor:
        """See ``VocabShard``."""
        widest = max(map(len, self._parts))
        padded = torch.nn.functional.pad(columns, (0, widest - columns.shape[1])).contiguous()
        gathered = self._group.gather(padded)
        return torch.cat(
            [part[:, : len(own)] for part, own in zip(gathered, self._parts, strict=True)], dim=1
        )


def vocab_of(group: TensorParallelGroup, parts: list[range]) -> VocabShard:
    """What ``parts`` of the vocabulary are to this rank of ``group``; where one is all of it, every rank holds it."""
    whole = parts[-1].stop
    return WholeVocab(whole) if len(parts[0]) == whole else SharedVocab(group, parts)
