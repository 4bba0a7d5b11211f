"""Reads a GGUF file's metadata, and nothing of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf`
package reads it too, but makes numpy views of every string of the vocabulary: 2 s instead of 0.1.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class GgufError(ValueError):
    """The file is not GGUF of a version that is understood, or is cut short."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs: numbers, strings, and lists of them.

    Raises:
        OSError: the file cannot be read.
        GgufError: it is not what it should be.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).metadata()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise GgufError(f"{path.name} is cut short or damaged: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise GgufError(f"not a GGUF file of version 2 or 3 (begins with {magic!r}, version {version})")
        _, num_pairs = self._unpack("QQ")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._unpack("I")
            pairs[key] = self._value(kind)
        return pairs

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self._string()
        (value,) = self._unpack(_format(kind))
        return value

    def _array(self) -> list[Any]:
        kind, length = self._unpack("IQ")
        if length > len(self._data):
            raise GgufError(f"an array of {length} values does not fit the file")
        if kind in (_STRING, _ARRAY):
            read: Callable[[], Any] = self._string if kind == _STRING else self._array
            return [read() for _ in range(length)]
        return list(self._unpack(f"{length}{_format(kind)}"))

    def _string(self) -> str:
        start = self._at + 8
        (length,) = self._unpack("Q")
        self._at = start + length
        if self._at > len(self._data):
            raise IndexError("a string runs past the end")
        return self._data[start : self._at].decode("utf-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return found


def _format(kind: int) -> str:
    form = _NUMBERS.get(kind)
    if form is None:
        raise GgufError(f"metadata of unknown type {kind}")
    return form
