"""Device memory that all ranks of a group reach: torch's symmetric memory. NVLink multicast is not used.

There is none for ranks on several hosts, or for GPUs without peer access.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """A piece on each rank, of one size."""

    own: Tensor
    """[bytes] uint8: this rank's, zeros at first."""
    handle: _SymmetricMemory
    """The others' as this rank sees them, and signals between ranks, each a channel of a pair."""

    @property
    def addresses(self) -> Tensor:
        """[ranks] int64: where each rank's piece begins, as this rank sees it."""
        return torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64, device="cuda")


def open_symmetric_memory(size: int, num_bytes: int) -> SymmetricMemory | None:
    """Map ``num_bytes`` of all ranks of the default group into each; None, on all alike, where that cannot be done."""
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, f"{socket.gethostname()} {_boot_id()}")
    if len(set(hosts)) > 1:
        logger.info("ranks on %d hosts: sums over ranks by NCCL", len(set(hosts)))
        return None
    memory = None
    try:
        memory = _share(num_bytes)
    except RuntimeError as error:
        logger.warning("no memory that all ranks reach, sums over ranks by NCCL: %s", error)
    is_open = torch.full((1,), float(memory is not None), device="cuda")
    dist.all_reduce(is_open, op=dist.ReduceOp.MIN)
    return memory if is_open.item() else None


def _share(num_bytes: int) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as of_torch

    device, group = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD
    assert group is not None, "the ranks have met"
    own = of_torch.empty((num_bytes,), dtype=torch.uint8, device=device)
    handle = of_torch.rendezvous(own, group.group_name)
    own.zero_()
    torch.cuda.synchronize()
    dist.barrier(device_ids=[device.index])  # nobody writes to memory that its owner is yet to clear
    return SymmetricMemory(own, handle)


def _boot_id() -> str:
    """Tells hosts of one name apart; empty where there is no such file."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
