"""Copies of many pieces of memory to and from a GPU, all queued by one call of the CUDA runtime.

torch has a call for each piece, which takes the host some 8 us; here a piece takes 0.5 us, and the copy engines go
from one to the next without a pause. Source: CUDA runtime API, "Memory Management", ``cudaMemcpyBatchAsync``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FIRST_VERSION = 12080
"""CUDA 12.8."""
_WITHOUT_FAILED_INDEX = 13000
"""Until CUDA 13 the call also tells which copy was refused."""
_IN_STREAM_ORDER = 1
"""``cudaMemcpySrcAccessOrderStream``."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``: without hints where the memory is, which the driver knows."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchedCopy:
    """The runtime's call for tensors."""

    def __init__(self, call: Callable[..., int], tells_failed_index: bool = False) -> None:
        """Wrap ``cudaMemcpyBatchAsync``; ``tells_failed_index`` of CUDA 12's form."""
        self._call = call
        self._failed_index = (ctypes.byref(ctypes.c_size_t()),) if tells_failed_index else ()
        self._attributes = _Attributes(_IN_STREAM_ORDER)

    def __call__(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]], stream: int) -> None:
        """Queue copies of ``source[i]`` to ``target[j]`` for all pairs ``(i, j)``, in no order among themselves.

        Args:
            source: [num_blocks, ...], contiguous; on a GPU, or pinned.
            target: likewise, with blocks of the same size; no block may be written twice, or be read as well.
            pairs: of blocks, one at least.
            stream: handle of a CUDA stream other than the default one, which the call does not take.

        Raises:
            RuntimeError: CUDA refuses the call; gives its error.
        """
        size = source[0].numel() * source.itemsize
        # 64 bits each, as pointers and ``size_t`` are. The call has read all arrays when it returns.
        blocks = np.array(pairs, dtype=np.uint64).T
        sources = source.data_ptr() + blocks[0] * np.uint64(size)
        targets = target.data_ptr() + blocks[1] * np.uint64(size)
        sizes = np.full(len(pairs), size, dtype=np.uint64)
        attributes_of_first = ctypes.c_size_t(0)
        error = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(pairs),
            ctypes.byref(self._attributes),
            ctypes.byref(attributes_of_first),
            1,
            *self._failed_index,
            stream,
        )
        if error:
            raise RuntimeError(
                f"cudaMemcpyBatchAsync of {len(pairs)} pieces of {size} bytes: CUDA error {error}"
            )


@functools.cache
def batched_copy() -> BatchedCopy | None:
    """The call of the runtime that torch has loaded; None where that or the driver is older, or not CUDA's."""
    major = (torch.version.cuda or "").partition(".")[0]
    if not major or not torch.cuda.is_available():
        return None
    try:
        runtime: Any = ctypes.CDLL(f"libcudart.so.{major}")  # by its name: the one that is loaded already
        version, driver_version = ctypes.c_int(), ctypes.c_int()
        errors = (
            runtime.cudaRuntimeGetVersion(ctypes.byref(version)),
            runtime.cudaDriverGetVersion(ctypes.byref(driver_version)),
        )
        # A runtime works with older drivers, but for what they do not have.
        if any(errors) or min(version.value, driver_version.value) < _FIRST_VERSION:
            return None
        call = runtime.cudaMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    tells_failed_index = version.value < _WITHOUT_FAILED_INDEX
    call.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size]
    call.argtypes += [pointer] * (2 if tells_failed_index else 1)
    return BatchedCopy(call, tells_failed_index)
