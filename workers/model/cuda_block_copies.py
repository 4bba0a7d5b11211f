"""Copies between the tiers on CUDA: on two streams of their own, one each way, beside the steps.

A copy begins once all steps launched before it have run: a block copied out is then complete, one copied into is no
longer read. It may end at any time later. Large blocks go through the copy engines, a call for each run of blocks that
are neighbours on both sides; of small ones a call each would take longer than the copy, so a kernel moves them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.block_copy import copy_blocks
from workers.engine.plan import BlockCopy, StepPlan
from workers.model.batched_copy import batched_copy
from workers.model.block_copies import Agree, CopyReport, HostBlocks

Mover = Literal["batch", "kernel", "engine"]
"""All blocks by one call of the copy engines, by a kernel, or by a call for each run."""
_KERNEL_BYTES, _KERNEL_BYTES_WITHOUT_BATCH = 128 << 10, 512 << 10
"""Blocks up to this size are moved by the kernel; the copy engines leave the multiprocessors to the steps. Out and both
ways together, at 64 / 256 / 512 / 2048 KiB, an H200 copies 25, 36 / 46, 80 / 51, 91 / 54, 99 GB/s by one call, 36, 50 /
49, 70 / 50, 71 / 52, 75 by the kernel, and 8, 8 / 31, 31 / 40, 59 / 50, 92 by a call each."""
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
        self, kv_cache: Tensor, host: HostBlocks, mover: Mover | None = None, agree: Agree = list
    ) -> None:
        """Copy between ``kv_cache`` on a device and ``host`` in pinned memory.

        Args:
            kv_cache: [num_blocks, ...].
            host: the other tier.
            mover: what moves the blocks; None: what is best for their size.
            agree: see ``BlockCopies``.
        """
        self._agree = agree
        self._kv_cache = kv_cache
        self._host = host
        self._device = kv_cache.device
        self._mover = mover or _best_mover(kv_cache[0].numel() * kv_cache.itemsize)
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

        Queueing takes the host time for each block, for which the step need not wait.
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
        device, host = self._kv_cache, self._host.memory
        outs = [(copy.device, copy.host) for copy in plan.swap_out]
        ins = [(copy.host, copy.device) for copy in intact]
        # A call a block by turns, so that neither direction waits until the other's copies are queued.
        turn = _TURN if self._mover == "engine" else max(len(outs), len(ins), 1)
        for start in range(0, max(len(outs), len(ins)), turn):
            self._move(device, host, outs[start : start + turn], self._out_stream)
            self._move(host, device, ins[start : start + turn], self._in_stream)
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

    def _move(
        self, source: Tensor, target: Tensor, pairs: list[tuple[int, int]], stream: torch.cuda.Stream
    ) -> None:
        if not pairs:
            return
        if self._mover == "batch":
            move = batched_copy()
            assert move is not None, "chosen where it is there"
            move(source, target, pairs, stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            if self._mover == "kernel":
                on_device = torch.tensor(pairs, dtype=torch.int32).pin_memory()
                copy_blocks(source, target, on_device.to(self._device, non_blocking=True))
                return
            for first, second, count in _runs(pairs):
                target[second : second + count].copy_(source[first : first + count], non_blocking=True)


def _best_mover(block_bytes: int) -> Mover:
    has_batch = batched_copy() is not None
    if block_bytes % 8 == 0 and block_bytes <= (_KERNEL_BYTES if has_batch else _KERNEL_BYTES_WITHOUT_BATCH):
        return "kernel"
    return "batch" if has_batch else "engine"


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Each run of neighbours on both sides: where it begins on each, and its length."""
    start = 0
    for index in range(1, len(pairs) + 1):
        first, second = pairs[start]
        length = index - start
        if index == len(pairs) or pairs[index] != (first + length, second + length):
            yield first, second, length
            start = index
