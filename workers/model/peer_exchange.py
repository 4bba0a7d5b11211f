"""Which way a group of CUDA ranks adds small rows fastest: found by measurement when the group starts.

Where no memory can be had that all ranks reach, NCCL does it all.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.all_reduce import PeerMemory, peer_memory_bytes
from workers.model.symmetric_memory import open_symmetric_memory

logger = logging.getLogger(__name__)

FLAGGED_ROWS = 256
"""Beyond, twice the bytes cost more than a fence at any width that is served."""
STAGED_ROWS = 2048
"""As many rows as a prefill graph has; more are NCCL's, whose ring sends less from three ranks on."""
_MOST_BYTES = 128 << 20
"""Of one way on one GPU: beside a model that needs eight of them, rows are long and wait for seven others."""
_SIZES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows measured; between two of them the larger decides."""
_CALLS = 24
_REPLAYS = 5

Reduce = Callable[[Tensor, Tensor, Tensor, PeerMemory | None], object]
"""Adds x [rows, width] over ranks to a residual and normalises with a weight; None is NCCL and a kernel after it."""


@dataclass(frozen=True, slots=True)
class ReduceTime:
    """Microseconds of one sum over ranks with residual and norm, by way; the slowest rank's."""

    num_rows: int
    nccl_us: float
    flagged_us: float | None
    """None: more rows than its memory has, as ``staged_us``."""
    staged_us: float | None


class PeerExchange:
    """The memory of both ways, and by number of rows which one is fastest."""

    def __init__(self, flagged: PeerMemory, staged: PeerMemory) -> None:
        """Nothing is measured yet: flagged where it fits, then staged."""
        self._flagged = flagged
        self._staged = staged
        self._best: list[PeerMemory | None] = []
        self.times: list[ReduceTime] = []

    def best(self, num_rows: int) -> PeerMemory | None:
        """Return the memory by which ``num_rows`` rows are added fastest; None: by NCCL."""
        if num_rows > self._staged.max_rows:
            return None
        if not self._best:
            return self._flagged if num_rows <= self._flagged.max_rows else self._staged
        return self._best[min(bisect.bisect_left(_SIZES, num_rows), len(self._best) - 1)]

    def measure(self, reduce: Reduce) -> None:
        """Time each way inside CUDA graphs, as it will run. All ranks together; they come to the same choice."""
        for num_rows in _SIZES:
            ways: list[PeerMemory | None] = [None]
            ways += [way for way in (self._flagged, self._staged) if num_rows <= way.max_rows]
            seconds = torch.tensor([self._time(num_rows, way, reduce) for way in ways], device="cuda")
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found = seconds.tolist()
            self._best.append(ways[found.index(min(found))])
            by_way = dict(zip([id(way) for way in ways], found, strict=True))
            flagged, staged = by_way.get(id(self._flagged)), by_way.get(id(self._staged))
            self.times.append(
                ReduceTime(
                    num_rows,
                    round(found[0] * 1e6, 2),
                    None if flagged is None else round(flagged * 1e6, 2),
                    None if staged is None else round(staged * 1e6, 2),
                )
            )
        logger.info("sums over ranks, microseconds: %s", self.times)

    def _time(self, num_rows: int, way: PeerMemory | None, reduce: Reduce) -> float:
        width, dtype = self._flagged.width, self._flagged.dtype
        x = torch.randn(num_rows, width, device="cuda").to(dtype)
        residual, weight = torch.zeros_like(x), torch.ones(width, dtype=dtype, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            reduce(x, residual, weight, way)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                reduce(x, residual, weight, way)
        best_s = float("inf")
        for _ in range(_REPLAYS):
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            best_s = min(best_s, started.elapsed_time(ended) / 1e3 / _CALLS)
        return best_s


def open_peer_exchange(rank: int, size: int, width: int, dtype: torch.dtype) -> PeerExchange | None:
    """Map the memory of all ranks of the default group into each; None, on all alike, where that cannot be done."""
    rows = {flagged: num_rows_of(size, width, dtype, flagged) for flagged in (True, False)}
    sizes = {
        flagged: peer_memory_bytes(size, num_rows, width, dtype, flagged)
        for flagged, num_rows in rows.items()
    }
    memory = open_symmetric_memory(size, sizes[True] + sizes[False])
    if memory is None:
        return None
    own, addresses = memory.own, memory.addresses
    memories = []
    for is_flagged, offset in ((True, 0), (False, sizes[True])):
        memories.append(
            PeerMemory(
                rank=rank,
                own=own[offset : offset + sizes[is_flagged]],
                addresses=addresses + offset,
                turns=torch.zeros(rows[is_flagged], dtype=torch.int32, device="cuda"),
                width=width,
                dtype=dtype,
                is_flagged=is_flagged,
            )
        )
    return PeerExchange(*memories)


def num_rows_of(size: int, width: int, dtype: torch.dtype, is_flagged: bool) -> int:
    """Return the most rows that are added one way, by ``size`` ranks."""
    row_bytes = peer_memory_bytes(size, 1, width, dtype, is_flagged)
    num_rows = min(FLAGGED_ROWS if is_flagged else STAGED_ROWS, _MOST_BYTES // row_bytes)
    return max(num_rows // 16 * 16, 16)  # whole multiples keep what follows aligned
