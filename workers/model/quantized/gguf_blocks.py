"""GGUF's quantized blocks as codes: nothing is rounded, so that weights are bit for bit what ``gguf`` dequantizes to.

Layouts are those of ggml's ``block_*`` structs. Types not listed here are dequantized by the library.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.codes import Codes

Bytes = NDArray[np.uint8]
_SUPER = 256
"""Columns of a K-quant's block."""


def read_codes(kind: str, blocks: Bytes, num_rows: int, width: int) -> Codes | None:
    """Return a matrix whose rows are ``blocks`` [rows, bytes] of type ``kind``; None for types that have no codes."""
    if kind not in _READERS:
        return None
    read, bits, group, block_bytes = _READERS[kind]
    values, scales, offsets = read(np.ascontiguousarray(blocks).reshape(-1, block_bytes))
    return Codes(
        torch.from_numpy(np.ascontiguousarray(values).reshape(num_rows, width)),
        bits,
        group,
        torch.from_numpy(np.ascontiguousarray(scales).reshape(num_rows, -1)),
        offsets=(
            None if offsets is None else torch.from_numpy(np.ascontiguousarray(offsets).reshape(num_rows, -1))
        ),
    )


Parts = tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]


def _halves(blocks: Bytes, start: int) -> NDArray[np.float32]:
    """One float16 a block, as [blocks, 1] float32."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves first, then high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] bytes to [blocks, 32] bits, placed as bit 4."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    # Stored signed; codes count from -128.
    return blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0), None


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6) << 4), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6) << 4), axis=1)
    return scales, minima


def _scaled_k(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    scales, minima = _k_scales(blocks[:, 4:16])
    return _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minima)


def _q4_k(blocks: Bytes) -> Parts:
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    values = np.stack((packed & 15, packed >> 4), axis=2)
    return values.reshape(-1, _SUPER), *_scaled_k(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    values = np.stack((packed & 15, packed >> 4), axis=2).reshape(-1, 8, 32)
    # Bit b of byte j is the fifth bit of column j of the b-th 32.
    fifths = (blocks[:, 16:48, None].transpose(0, 2, 1) >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (values | fifths << 4).reshape(-1, _SUPER), *_scaled_k(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    packed = blocks[:, :128].reshape(-1, 2, 64)
    low = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) * np.uint8(16)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return (low | high).reshape(-1, _SUPER), scales, None


_READERS: dict[str, tuple[Callable[[Bytes], Parts], int, int, int]] = {
    "Q4_0": (_q4_0, 4, 32, 18),
    "Q4_1": (_q4_1, 4, 32, 20),
    "Q5_0": (_q5_0, 5, 32, 22),
    "Q5_1": (_q5_1, 5, 32, 24),
    "Q8_0": (_q8_0, 8, 32, 34),
    "Q4_K": (_q4_k, 4, 32, 144),
    "Q5_K": (_q5_k, 5, 32, 176),
    "Q6_K": (_q6_k, 6, 16, 210),
}
"""Reader, bits, columns a scale, bytes a block."""
