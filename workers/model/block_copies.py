"""The host tier of a rank: its memory, and the copies of blocks to and from it.

Each host block keeps the generation with which it was written. A copy in that finds another, or, with checksums,
other bytes, moves nothing and is reported: the brain then computes again what it would have brought.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from workers.engine.plan import BlockCopy, StepPlan

_NEVER = 0

Agree = Callable[[list[bool]], list[bool]]
"""From what one rank says of some blocks to what all ranks of its group say together: true where each does."""


@dataclass(slots=True)
class CopyReport:
    """What has been done since the last report."""

    copied: int = -1
    """All copies of plans up to this one are done."""
    num_blocks: int = 0
    elapsed_s: float = 0.0
    corrupt_blocks: list[int] = field(default_factory=list)


class HostBlocks:
    """Host memory for blocks, each with the generation and, if wanted, the checksum of what was written last."""

    def __init__(self, memory: Tensor, has_checksums: bool) -> None:
        """Take over ``memory`` [num_blocks, ...], one contiguous piece a block."""
        self.memory = memory
        self._bytes = memory.view(torch.uint8).reshape(len(memory), -1).numpy() if has_checksums else None
        self._generations = [_NEVER] * len(memory)
        self._sums = [0] * len(memory)

    def write(self, copies: Sequence[BlockCopy]) -> None:
        """Note that copies out begin."""
        generations = self._generations
        for copy in copies:
            generations[copy.host] = copy.generation

    def seal(self, copies: Sequence[BlockCopy]) -> None:
        """Sum what copies out, now done, have brought."""
        if self._bytes is not None:
            for copy in copies:
                self._sums[copy.host] = zlib.crc32(self._bytes[copy.host])

    def judged(self, copies: Sequence[BlockCopy], agree: Agree) -> tuple[Sequence[BlockCopy], list[int]]:
        """Return the copies in that may be made, as all ranks see it, and the device blocks of the others.

        A block may be copied in if it is what was copied out with the same generation.
        """
        if not copies:
            return (), []
        # A call a block would take longer than what it compares.
        generations, sums, bytes_ = self._generations, self._sums, self._bytes
        own = [generations[copy.host] == copy.generation for copy in copies]
        if bytes_ is not None:
            own = [
                is_intact and zlib.crc32(bytes_[copy.host]) == sums[copy.host]
                for copy, is_intact in zip(copies, own, strict=True)
            ]
        told = agree(own)
        if all(told):
            return copies, []
        pairs = list(zip(copies, told, strict=True))
        return [copy for copy, is_intact in pairs if is_intact], [
            copy.device for copy, is_intact in pairs if not is_intact
        ]


class BlockCopies:
    """Copies on a CPU: made at once, in the order given; said to be done when a link of some rate would be."""

    def __init__(
        self,
        kv_cache: Tensor,
        host: HostBlocks,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        agree: Agree = list,
    ) -> None:
        """Copy between ``kv_cache`` and ``host``, whose blocks have one shape.

        Args:
            kv_cache: [num_blocks, ...].
            host: the other tier.
            bytes_per_s: rate of the link one way; None: that of the memory.
            clock: seconds, monotonic.
            sleep: waits.
            agree: ranks hold slices of the same blocks; one that is corrupt anywhere is corrupt.
        """
        self._agree = agree
        self._kv_cache = kv_cache
        self._host = host
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._block_bytes = kv_cache[0].numel() * kv_cache.itemsize
        self._due: deque[tuple[int, float, float, int, list[int]]] = deque()
        """Of each plan with copies: its step, when it is done, seconds, blocks, and what went wrong."""
        self._free_s = 0.0
        """When the link has nothing left to do."""

    def begin(self, plan: StepPlan) -> None:
        """Make the plan's copies, before its step."""
        started_s = self._clock()
        self._host.write(plan.swap_out)
        for copy in plan.swap_out:
            self._host.memory[copy.host].copy_(self._kv_cache[copy.device])
        self._host.seal(plan.swap_out)
        intact, corrupt = self._host.judged(plan.swap_in, self._agree)
        for copy in intact:
            self._kv_cache[copy.device].copy_(self._host.memory[copy.host])
        num_blocks = len(plan.swap_out) + len(plan.swap_in)
        now_s = self._clock()
        elapsed_s = now_s - started_s
        if self._bytes_per_s is not None:
            elapsed_s = max(elapsed_s, num_blocks * self._block_bytes / self._bytes_per_s)
        self._free_s = max(self._free_s, started_s) + (elapsed_s if num_blocks else 0.0)
        self._due.append((plan.step_id, self._free_s, elapsed_s, num_blocks, corrupt))

    def queue(self, plan: StepPlan) -> None:
        """Nothing is left to do: ``begin`` has copied."""

    def is_idle(self) -> bool:
        """True if all copies are done."""
        return not self._due or self._due[-1][1] <= self._clock()

    def report(self, waits: bool) -> CopyReport:
        """What is done by now; with ``waits``, once all is."""
        report = CopyReport()
        while self._due:
            step_id, due_s, elapsed_s, num_blocks, corrupt = self._due[0]
            wait_s = due_s - self._clock()
            if wait_s > 0:
                if not waits:
                    break
                self._sleep(wait_s)
            self._due.popleft()
            report.copied = step_id
            report.corrupt_blocks += corrupt
            if num_blocks:
                report.num_blocks += num_blocks
                report.elapsed_s += elapsed_s
        return report


def allocate_host(num_blocks: int, kv_cache: Tensor) -> Tensor:
    """Return host memory for ``num_blocks`` blocks shaped like those of ``kv_cache``; pinned where that is on a GPU."""
    shape = (num_blocks, *kv_cache.shape[1:])
    if kv_cache.device.type == "cuda":
        return torch.empty(shape, dtype=kv_cache.dtype, pin_memory=True)
    # numpy's zeros are pages that the kernel provides on first use.
    num_bytes = num_blocks * kv_cache[0].numel() * kv_cache.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(kv_cache.dtype).view(shape)
