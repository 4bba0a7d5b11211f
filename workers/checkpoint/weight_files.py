"""The safetensors files of a model folder by their headers: which tensors there are, where and of which shape.

No tensor is read. The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workers.engine.errors import UnknownModel

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""As the library has it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is."""

    path: Path
    dtype: str
    """As the format writes it: "F32", "BF16", "I32"."""
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of ``folder`` by name: those that its index names, or all of all its files.

    Raises:
        UnknownModel: there are none, or a file is missing, damaged, cut off or not in the folder; it is named.
    """
    index = folder / _INDEX
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UnknownModel(_without_weights(folder), "model")
        return {name: tensor for path in paths for name, tensor in _header(path).items()}
    places = _places(index)
    missing = sorted(file for file in set(places.values()) if not (folder / file).is_file())
    if missing:
        raise UnknownModel(
            f"{folder / missing[0]} is missing, though the folder's index names it: fetch the model again",
            "model",
        )
    headers = {file: _header(folder / file) for file in set(places.values())}
    for name, file in places.items():
        if name not in headers[file]:
            raise UnknownModel(
                f"{folder / file} has no tensor {name}, though the folder's index says so: fetch the model again",
                "model",
            )
    return {name: headers[file][name] for name, file in places.items()}


def _places(index: Path) -> dict[str, str]:
    """File by tensor."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(places.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnknownModel(
            f"{index} cannot be read ({type(error).__name__}: {error}): fetch it again", "model"
        ) from error
    for file in files:
        if (
            not isinstance(file, str)
            or PurePosixPath(file).is_absolute()
            or ".." in PurePosixPath(file).parts
        ):
            raise UnknownModel(f"{index} names {file!r}, which is no file of its own folder", "model")
    return dict(places)


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            # What is cut off there is no JSON.
            entries = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        tensors = {
            name: StoredTensor(path, str(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        ends = (entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
        needed = _LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        raise UnknownModel(f"{path} cannot be read: {error.strerror}", "model") from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise UnknownModel(
            f"{path} is damaged or cut off (its header is not one): fetch it again", "model"
        ) from error
    size = path.stat().st_size
    if size < needed:
        raise UnknownModel(
            f"{path} is damaged or cut off ({size:,} of {needed:,} bytes): fetch it again", "model"
        )
    return tensors


def _without_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    hint = f" ({pickled[0]} is pickled, which can run code: it is not read)" if pickled else ""
    return (
        f"{folder} holds no .safetensors file{hint}: fetch the model again, or serve random weights with "
        "--load-format dummy"
    )
