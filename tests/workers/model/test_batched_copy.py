"""The arguments of the CUDA runtime's batched copy, taken at their word by a stand-in that copies on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from workers.model.batched_copy import BatchedCopy, batched_copy


class Runtime:
    """Does what the call asks for, whichever form it has."""

    def __init__(self, tells_failed_index: bool) -> None:
        self.tells_failed_index = tells_failed_index
        self.error = 0
        self.streams: list[int] = []

    def __call__(self, targets: int, sources: int, sizes: int, count: int, *others: Any) -> int:
        attributes, attributes_of_first, num_attributes, *failed_index, stream = others
        assert len(failed_index) == int(self.tells_failed_index)
        # Order of the source, two places of type and id, flags.
        assert bytes(attributes._obj) == np.array([1, 0, 0, 0, 0, 0], dtype=np.int32).tobytes()
        assert (attributes_of_first._obj.value, num_attributes) == (0, 1)
        self.streams.append(stream)
        lists = (ctypes.POINTER(ctypes.c_uint64 * count), ctypes.POINTER(ctypes.c_size_t * count))
        to, by = (ctypes.cast(pointer, lists[0]).contents for pointer in (targets, sources))
        for target, source, size in zip(to, by, ctypes.cast(sizes, lists[1]).contents, strict=True):
            ctypes.memmove(target, source, size)
        return self.error


@pytest.mark.parametrize("tells_failed_index", [False, True])
def test_each_block_goes_where_its_pair_says(tells_failed_index: bool) -> None:
    runtime = Runtime(tells_failed_index)
    source = torch.randn(5, 2, 3, dtype=torch.float32)
    target = torch.zeros(7, 2, 3)

    BatchedCopy(runtime, tells_failed_index)(source, target, [(4, 0), (0, 6), (2, 3)], stream=77)

    assert torch.equal(target[[0, 6, 3]], source[[4, 0, 2]])
    assert not target[[1, 2, 4, 5]].any()
    assert runtime.streams == [77]


def test_a_refused_call_gives_cudas_error() -> None:
    runtime = Runtime(tells_failed_index=False)
    runtime.error = 1

    with pytest.raises(RuntimeError, match="1 pieces of 8 bytes: CUDA error 1"):
        BatchedCopy(runtime)(torch.zeros(2, 2), torch.zeros(2, 2), [(0, 1)], stream=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_there_is_no_such_call() -> None:
    assert batched_copy() is None


class Library:
    """The versions that a runtime tells, and its call."""

    def __init__(self, runtime: int, driver: int, error: int = 0) -> None:
        self.error = error
        self.cudaRuntimeGetVersion = lambda place: self.tell(place, runtime)
        self.cudaDriverGetVersion = lambda place: self.tell(place, driver)
        self.cudaMemcpyBatchAsync = Runtime(tells_failed_index=runtime < 13000)

    def tell(self, place: Any, version: int) -> int:
        place._obj.value = version
        return self.error


@pytest.mark.parametrize(
    ("runtime", "driver", "is_there"),
    [
        (13000, 13000, True),
        (13000, 13020, True),
        (12080, 12080, True),
        (12060, 13000, False),
        (12080, 12040, False),
    ],
)
def test_the_call_is_taken_where_runtime_and_driver_have_it(
    monkeypatch: pytest.MonkeyPatch, runtime: int, driver: int, is_there: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", f"{runtime // 1000}.{runtime % 1000 // 10}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(runtime, driver))
    source, target = torch.randn(3, 2), torch.zeros(3, 2)

    found = batched_copy.__wrapped__()

    assert (found is not None) == is_there
    if found is not None:
        found(source, target, [(2, 1)], stream=3)
        assert torch.equal(target[1], source[2])
