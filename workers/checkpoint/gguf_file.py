"""A GGUF file: metadata and tensors as plain values and numpy arrays, through the ``gguf`` library. No model knowledge.

Opening takes the library about two seconds for a vocabulary of 49,152 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from workers.engine.errors import UserError

Scalar = int | float | bool | str
MetadataValue = Scalar | list[Scalar]


class GgufFile:
    """One GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Read the header of ``path``.

        Raises:
            UserError: it is no GGUF file, or it is damaged.
        """
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror or error})", "model") from error
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            # The library tells a wrong version in its words, an end amid the header in numpy's.
            raise UserError(f"{path} {_what_is_wrong(path)}: fetch it again", "model") from error
        self.metadata: Mapping[str, MetadataValue] = {
            key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            tensor.name: tuple(int(length) for length in tensor.shape[::-1]) for tensor in reader.tensors
        }
        """By tensor name; row-major, as numpy and torch write shapes."""

    def read(self, name: str) -> np.ndarray:
        """Return tensor ``name`` dequantized to float32.

        Raises:
            UserError: the library cannot dequantize its type.
        """
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UserError(
                f"{self.path}: tensor {name} is {kind}, which cannot be dequantized", "model"
            ) from error
        return values.reshape(self.shapes[name])

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """Return the type of tensor ``name`` and its bytes as they are, [rows, bytes]; mapped, not read."""
        tensor = self._tensors[name]
        return tensor.tensor_type.name, tensor.data


def _what_is_wrong(path: Path) -> str:
    """Of a file that the library does not read."""
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] != b"GGUF":
        return "is not a GGUF file, which begins with these letters"
    version = int.from_bytes(head[4:], "little")
    if len(head) == 8 and version not in gguf.gguf_reader.READER_SUPPORTED_VERSIONS:
        return f"is of GGUF version {version}, which is not read"
    return "is a GGUF file that is damaged or not whole"
