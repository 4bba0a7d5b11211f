"""Triton where it is installed, and a stand-in where it is not (a Mac): kernels then fail at launch, not on import.

``gdc_wait`` and ``gdc_launch_dependents`` are programmatic dependent launch (sm_90): a kernel launched with
``pdl_options`` may start while the one before it drains, and must wait before it reads or writes what others do.
Every such kernel waits, so that a kernel's end implies the end of all before it, and lets the next one start only after
its own wait: what the kernel before the last wrote can then be read without waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:

    class _NeedsTriton:
        """Takes a kernel's place; indexing it, as a launch does, says what is missing."""

        def __init__(self, kernel: Callable[..., Any]) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> NoReturn:
            raise RuntimeError(f"{self.kernel.__name__} needs Triton, which is not installed")

    def _jit(kernel: Callable[..., Any] | None = None, **options: object) -> Any:
        return _NeedsTriton(kernel) if kernel is not None else _NeedsTriton

    triton = SimpleNamespace(jit=_jit, cdiv=lambda x, y: -(-x // y))
    tl = SimpleNamespace(constexpr=object)
    gdc_wait = gdc_launch_dependents = None

# Gluon is Triton's lower language, still called experimental: versions that our kernels were compiled with.
_GLUON_VERSIONS = ("3.6.", "3.7.")
if getattr(triton, "__version__", "").startswith(_GLUON_VERSIONS):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia import hopper as gluon_hopper

    # Of the warps that run a function; Triton 3.7 gave it another name.
    thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
else:
    gluon = gl = gluon_hopper = thread_barrier = None
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None

__all__ = [
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "gluon_hopper",
    "has_pdl",
    "is_hopper",
    "mbarrier",
    "next_power_of_2",
    "pdl_options",
    "thread_barrier",
    "tl",
    "tma",
    "triton",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def has_pdl(device: torch.device) -> bool:
    """True where a kernel can be started before the one ahead of it has ended."""
    return device.type == "cuda" and _capability(device.index or 0) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """True on sm_90, whose ``wgmma`` no later architecture has."""
    return device.type == "cuda" and _capability(device.index or 0) == (9, 0)


def pdl_options(is_on: bool) -> dict[str, bool]:
    """Launch options of a kernel whose ``PDL`` is ``is_on``; the interpreter knows no such option."""
    return {"launch_pdl": True} if is_on else {}


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is no less than ``value``, at least 1."""
    return 1 << max(value - 1, 0).bit_length()
