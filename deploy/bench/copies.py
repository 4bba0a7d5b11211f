"""Bandwidth of block copies between the tiers, one way and both, by the size of a block; needs a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from workers.engine.plan import BlockCopy, StepPlan
from workers.model.batched_copy import batched_copy
from workers.model.block_copies import HostBlocks, allocate_host
from workers.model.cuda_block_copies import CudaBlockCopies, Mover

_TOTAL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CopyRate:
    """GB/s, both directions added for ``both``; wall time with the launch on the host."""

    block_kib: int
    way: str
    """"batch": copy engines, one call for all; "engine": one for each run of neighbours; "kernel"."""
    out: float
    into: float
    both: float
    launch_us_a_block: float
    """The host's time to queue a block's copy."""


def measure_copy_rates(block_bytes: int, num_blocks: int | None = None, repeats: int = 3) -> list[CopyRate]:
    """Best of ``repeats`` over blocks in random order on both sides, by each way that is there."""
    count = num_blocks or min(4096, _TOTAL_BYTES // block_bytes)
    kv = torch.zeros(2 * count, block_bytes // 2, dtype=torch.bfloat16, device="cuda")
    memory = allocate_host(2 * count, kv)
    generator = torch.Generator().manual_seed(0)
    device, host = (torch.randperm(2 * count, generator=generator).tolist() for _ in range(2))
    outs = [BlockCopy(d, h, 1) for d, h in zip(device[:count], host[:count], strict=True)]
    ins = [BlockCopy(d, h, 1) for d, h in zip(device[count:], host[count:], strict=True)]
    rates = []
    movers: tuple[Mover, ...] = ("engine", "kernel")
    for way in movers if batched_copy() is None else (*movers, "batch"):
        blocks = HostBlocks(memory, has_checksums=False)
        blocks.write(ins)
        copies = CudaBlockCopies(kv, blocks, way)
        launch_s = 0.0

        def timed(swap_out: list[BlockCopy], swap_in: list[BlockCopy], copies: CudaBlockCopies) -> float:
            nonlocal launch_s
            best_s = float("inf")
            for step in range(repeats + 1):
                torch.cuda.synchronize()
                started_s = time.perf_counter()
                plan = StepPlan(step, [], [], [], [], [], [], swap_out, swap_in)
                copies.begin(plan)
                copies.queue(plan)
                launch_s = time.perf_counter() - started_s
                report = copies.report(waits=True)
                assert not report.corrupt_blocks, "copies have gone wrong"
                if step:
                    best_s = min(best_s, time.perf_counter() - started_s)
            return best_s

        gigabytes = count * block_bytes / 1e9
        out_s, in_s, both_s = timed(outs, [], copies), timed([], ins, copies), timed(outs, ins, copies)
        rates.append(
            CopyRate(
                block_bytes >> 10,
                way,
                round(gigabytes / out_s, 1),
                round(gigabytes / in_s, 1),
                round(2 * gigabytes / both_s, 1),
                round(1e6 * launch_s / (2 * count), 2),
            )
        )
    return rates
