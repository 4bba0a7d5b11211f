"""Copies between the tiers on CUDA: on two streams of their own, one each way, beside the steps.

A copy begins once all steps launched before it have run: a block copied out is then complete, one copied into is no
longer read. It may end at any time later. Large blocks go through the copy engines, a call for each run of blocks that
are neighbours on both sides; of small ones a call each would take longer than the copy, so a kernel moves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.block_copy import copy_blocks
from workers.engine.plan import BlockCopy, StepPlan
from workers.model.block_copies import Agree, CopyReport, HostBlocks

_KERNEL_BYTES = 512 << 10
"""Blocks up to this size are moved by the kernel. On an H200 at 256 / 512 / 2048 KiB it reaches 47 / 49 / 50 GB/s one
way, the copy engines 29 / 41 / 51; those leave the multiprocessors to the steps."""
_TURN = 16
"""Blocks queued in one direction before the other's turn."""


@dataclass(slots=True)
class _Way:
    """The copies of one plan in one direction."""

    copies: Sequence[BlockCopy]
    started: torch.cuda.Event
    ended: torch.cuda.Event


@dataclass(slots=True)
class _Batch:
    """The copies of one plan."""

    step_id: int
    ways: list[_Way]
    swap_out: Sequence[BlockCopy]
    corrupt_blocks: list[int]


class CudaBlockCopies:
    """Queues copies and says which are done. The same face as ``BlockCopies``."""

    def __init__(
        self, kv_cache: Tensor, host: HostBlocks, kernel_bytes: int = _KERNEL_BYTES, agree: Agree = list
    ) -> None:
        """Copy between ``kv_cache`` on a device and ``host`` in pinned memory.

        Args:
            kv_cache: [num_blocks, ...].
            host: the other tier.
            kernel_bytes: blocks up to this size are moved by a kernel.
            agree: see ``BlockCopies``.
        """
        self._agree = agree
        self._kv_cache = kv_cache
        self._host = host
        self._device = kv_cache.device
        self._block_bytes = kv_cache[0].numel() * kv_cache.itemsize
        self._uses_kernel = self._block_bytes <= kernel_bytes and self._block_bytes % 8 == 0
        self._out_stream, self._in_stream = (torch.cuda.Stream(self._device) for _ in range(2))
        self._batches: deque[_Batch] = deque()
        self._reached = torch.cuda.Event()
        """All steps launched before the copies that are to be queued."""
        self._queued = -1
        """The last plan whose copies were queued."""

    def begin(self, plan: StepPlan) -> None:
        """Make sure of the copies that the plan's step counts on, and mark where its own copies may begin."""
        for batch in self._batches:
            if batch.step_id <= plan.copies_awaited:
                # A rank other than 0: the brain heard of rank 0's copies only.
                self._settle(batch)
        if plan.swap_out or plan.swap_in:
            self._reached = torch.cuda.Event()
            self._reached.record()

    @torch.inference_mode()  # as both tiers were made
    def queue(self, plan: StepPlan) -> None:
        """Queue the plan's copies, after its step is launched: that reads and writes none of their blocks.

        Queueing takes the host some 10 us a block, for which the step need not wait.
        """
        self._queued = plan.step_id
        if not plan.swap_out and not plan.swap_in:
            return
        self._host.write(plan.swap_out)
        intact, corrupt = self._host.judged(plan.swap_in, self._agree)
        ways = [
            self._start(copies, stream)
            for copies, stream in ((plan.swap_out, self._out_stream), (intact, self._in_stream))
        ]
        # By turns, so that neither direction waits until the other's copies are queued.
        for start in range(0, max(len(plan.swap_out), len(intact)), _TURN):
            end = start + _TURN if not self._uses_kernel else None
            with torch.cuda.stream(self._out_stream):
                self._copy_out(plan.swap_out[start:end])
            with torch.cuda.stream(self._in_stream):
                self._copy_in(intact[start:end])
            if self._uses_kernel:
                break
        for way, stream in zip(ways, (self._out_stream, self._in_stream), strict=True):
            way.ended.record(stream)
        ways = [way for way in ways if way.copies]
        self._batches.append(_Batch(plan.step_id, ways, plan.swap_out, corrupt))

    def report(self, waits: bool) -> CopyReport:
        """What is done by now; with ``waits``, once all is."""
        report = CopyReport()
        while self._batches:
            batch = self._batches[0]
            if not waits and not all(way.ended.query() for way in batch.ways):
                report.copied = batch.step_id - 1
                return report
            self._settle(batch)
            self._batches.popleft()
            report.corrupt_blocks += batch.corrupt_blocks
            for way in batch.ways:
                report.num_blocks += len(way.copies)
                report.elapsed_s += way.started.elapsed_time(way.ended) / 1e3
        report.copied = self._queued
        return report

    def is_idle(self) -> bool:
        """True if all copies queued are done."""
        return all(way.ended.query() for batch in self._batches for way in batch.ways)

    def _settle(self, batch: _Batch) -> None:
        for way in batch.ways:
            way.ended.synchronize()
        self._host.seal(batch.swap_out)
        batch.swap_out = ()

    def _start(self, copies: Sequence[BlockCopy], stream: torch.cuda.Stream) -> _Way:
        """Mark the beginning of one direction's copies."""
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.wait_event(self._reached)
        started.record(stream)
        return _Way(copies, started, ended)

    def _copy_out(self, copies: Sequence[BlockCopy]) -> None:
        device, host = self._kv_cache, self._host.memory
        if not copies:
            return
        if self._uses_kernel:
            copy_blocks(device, host, self._pairs([(copy.device, copy.host) for copy in copies]))
            return
        for first, count in _runs(copies):
            source = device[first.device : first.device + count]
            host[first.host : first.host + count].copy_(source, non_blocking=True)

    def _copy_in(self, copies: Sequence[BlockCopy]) -> None:
        device, host = self._kv_cache, self._host.memory
        if not copies:
            return
        if self._uses_kernel:
            copy_blocks(host, device, self._pairs([(copy.host, copy.device) for copy in copies]))
            return
        for first, count in _runs(copies):
            source = host[first.host : first.host + count]
            device[first.device : first.device + count].copy_(source, non_blocking=True)

    def _pairs(self, pairs: list[tuple[int, int]]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.int32).pin_memory().to(self._device, non_blocking=True)


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, int]]:
    """The first copy and the length of each run of neighbours on both sides."""
    start = 0
    for index in range(1, len(copies) + 1):
        first, length = copies[start], index - start
        if (
            index == len(copies)
            or copies[index].device != first.device + length
            or copies[index].host != first.host + length
        ):
            yield first, length
            start = index
