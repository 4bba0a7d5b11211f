"""Reads a GGUF file: metadata and tensors, as plain values and numpy arrays. No model knowledge.

The format (version 2 and 3, little-endian) is described in ggml's docs/gguf.md. The header is parsed here because the
``gguf`` library takes two seconds for a vocabulary of 49,152 tokens; dequantizing is the library's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from workers.engine.errors import UserError

Scalar = int | float | bool | str
MetadataValue = Scalar | list[Scalar]

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is row-major, as numpy and torch write it."""

    name: str
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.quantization]
        return int(np.prod(self.shape)) // block_size * block_bytes


class GgufFile:
    """One GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Parse the header of ``path``; raise ``UserError`` if it is not a GGUF file that can be read."""
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise UserError(f"{path} is too short to be a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._take(4) != _MAGIC:
            raise UserError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise UserError(f"{path} is damaged or of an unknown GGUF version: {error}") from error

    def read(self, name: str) -> np.ndarray:
        """Return tensor ``name`` dequantized to float32; quantized types that the library lacks raise ``UserError``."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        if tensor.quantization == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        if tensor.quantization == gguf.GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            return gguf.dequantize(rows, tensor.quantization).reshape(tensor.shape)
        except NotImplementedError as error:
            kind = tensor.quantization.name
            raise UserError(f"{self.path}: tensor {name} is {kind}, which cannot be dequantized") from error

    def _parse(self) -> None:
        version, num_tensors, num_values = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        self.metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            key = self._string()
            (kind,) = self._unpack("<I")
            self.metadata[key] = self._array() if kind == _ARRAY else self._scalar(kind)
        places: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = self._string()
            (num_axes,) = self._unpack("<I")
            shape = self._unpack(f"<{num_axes}Q")
            kind, offset = self._unpack("<IQ")
            places.append((name, shape[::-1], kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {
            name: GgufTensor(name, shape, gguf.GGMLQuantizationType(kind), start + offset)
            for name, shape, kind, offset in places
        }
        for tensor in self.tensors.values():
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(f"tensor {tensor.name} ends behind the end of the file")

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        if kind == _BOOL:
            return self._take(1) != b"\0"
        value: int | float = self._unpack("<" + _NUMBER_FORMATS[kind])[0]
        return value

    def _array(self) -> list[Scalar]:
        kind, length = self._unpack("<IQ")
        if kind in _NUMBER_FORMATS:
            return list(self._unpack(f"<{length}{_NUMBER_FORMATS[kind]}"))
        return [self._scalar(kind) for _ in range(length)]

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._take(length).decode("utf-8")

    def _unpack(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _take(self, length: int) -> bytes:
        if self._at + length > len(self._data):
            raise ValueError("it ends inside the header")
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken
