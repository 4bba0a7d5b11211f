"""A plan in numbers on the host, and the way of such numbers to the device: one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.chunk_work import ChunkArrays

_ALIGNMENT = 16
"""Bytes: kernels have another variant for addresses that are no multiple of it."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What ``StepInputs`` says, before it is on the device."""

    num_decodes: int
    token_places: NDArray[np.int64]
    """[num_tokens]: where each token stands in ``Batch.token_ids``, its rows one after the other."""
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    """[num_rows]: places in the batch, decoding rows first."""
    context_lens: NDArray[np.int32]
    """[num_rows]."""
    query_starts: NDArray[np.int32]
    sample_tokens: NDArray[np.int64]
    tiles: NDArray[np.int32]
    """[num_tiles, 4]; none where queries are not cut beforehand."""
    num_prefill_blocks: int
    """Of the longest context of a row with more than one token."""
    chunks: ChunkArrays | None = None
    """The queries of few new tokens, with their contexts cut; None where they are many, or not to be cut."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return len(self.positions)

    @property
    def num_prefills(self) -> int:
        """Rows behind those that decode."""
        return len(self.rows) - self.num_decodes


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return ``arrays`` on ``device``; from pinned memory where that is not the host, so that nothing waits."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([aligned(array.nbytes) for array in arrays]).tolist()
    starts = [0, *ends[:-1]]
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    flat = pinned.numpy()
    for array, start in zip(arrays, starts, strict=True):
        flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    told = pinned.to(device, non_blocking=True)
    return [
        told[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def aligned(num_bytes: int) -> int:
    """``num_bytes`` and what is missing to the next aligned address."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
