"""Sums over a pair of ranks by copies: each sends its rows whole to the other and adds what it gets.

The GPUs' copy engines carry the rows, at 370 GB/s each way between two H200s, and leave all multiprocessors to the
products that run meanwhile; NCCL's kernels take some of them, and carry 240 GB/s. Between two ranks this takes the
bytes of a ring; among more a ring takes fewer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.rms_norm import add_two_rms_norm
from workers.model.symmetric_memory import SymmetricMemory, open_symmetric_memory

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 2
"""Sums that may be under way: those of a step's halves."""
_NUM_PLACES = 2 * MAX_UNDER_WAY
"""Sum 4 is written to the place of sum 0, and nobody need say that this has been read: a rank starts 4 only after it
has awaited 2, since no more than 3 may be under way beside it; so its peer has sent 2, which that started only after it
had awaited 0."""
_CALLS = 5


class PeerCopies:
    """This rank's side of a pair's sums, which both start and await in one order."""

    def __init__(
        self, rank: int, memory: SymmetricMemory, max_rows: int, width: int, dtype: torch.dtype
    ) -> None:
        """Take memory for ``_NUM_PLACES`` sums of ``max_rows`` rows."""
        self.max_rows = max_rows
        self._memory, self._handle = memory, memory.handle
        self._peer = 1 - rank
        shape = (_NUM_PLACES, max_rows, width)
        self._own = self._handle.get_buffer(rank, shape, dtype)
        self._theirs = self._handle.get_buffer(self._peer, shape, dtype)
        self._stream = torch.cuda.Stream()
        self._num_started = self._num_under_way = 0

    def send(self, x: Tensor, place: int) -> None:
        """Copy ``x`` to a place of the other rank, on the current stream. By no kernel: that would be a slower one."""
        self._theirs[place, : x.shape[0]].copy_(x, non_blocking=True)

    def start(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        """See ``TensorParallelGroup.start_add_rms_norm``; ``x`` has at most ``max_rows`` rows."""
        assert self._num_under_way < MAX_UNDER_WAY, "a place would be written before it has been read"
        place, count = self._num_started % _NUM_PLACES, x.shape[0]
        self._num_started += 1
        self._num_under_way += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.send(x, place)
            self._handle.put_signal(self._peer, place)
            sent = self._stream.record_event()

        def wait() -> Tensor:
            self._num_under_way -= 1
            self._handle.wait_signal(self._peer, place)
            out = add_two_rms_norm(x, self._own[place, :count], residual, weight, eps)
            # Whoever gets the memory of x next is on this stream.
            torch.cuda.current_stream().wait_event(sent)
            return out

        return wait


def copies_bytes(max_rows: int, width: int, dtype: torch.dtype) -> int:
    """Return how much memory a rank needs for sums of up to ``max_rows`` rows."""
    return _NUM_PLACES * max_rows * width * dtype.itemsize


def open_peer_copies(rank: int, max_rows: int, width: int, dtype: torch.dtype) -> PeerCopies | None:
    """Return what adds up to ``max_rows`` rows of a pair of ranks; None, on both alike, where NCCL is faster."""
    memory = open_symmetric_memory(2, copies_bytes(max_rows, width, dtype))
    if memory is None:
        return None
    copies = PeerCopies(rank, memory, max_rows, width, dtype)
    x = torch.zeros(max_rows, width, dtype=dtype, device="cuda")
    seconds = torch.tensor(
        [_time(lambda: copies.send(x, 0)), _time(lambda: dist.all_reduce(x))], device="cuda"
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    by_copies_s, by_nccl_s = seconds.tolist()
    logger.info(
        "%d rows, two ranks, microseconds: copied %.0f, summed by NCCL %.0f",
        max_rows,
        by_copies_s * 1e6,
        by_nccl_s * 1e6,
    )
    return copies if by_copies_s <= by_nccl_s else None


def _time(way: Callable[[], object]) -> float:
    """Seconds of a call on the device, with all ranks at it."""
    way()
    dist.barrier(device_ids=[torch.cuda.current_device()])
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(_CALLS):
        way()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3 / _CALLS
