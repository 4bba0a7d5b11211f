"""What ``shoal quantize`` cannot do, said before weights are read or anything is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.quantize.grids import GROUP
from deploy.quantize.layouts import METHODS
from workers.checkpoint.model_config import ModelConfig, read_model_config
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.weight_files import StoredTensor, stored_tensors
from workers.engine.errors import InvalidRequest
from workers.model.host_memory import host_memory_bytes
from workers.model.stored_shapes import check_shapes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose layers have the names and the norms that AWQ's scales are folded into."""
CHUNK_TOKENS = 512
"""Of calibration text that are computed together; a text must have as many."""
_WIDTH_MULTIPLE = 32
"""Of rows and columns: the layouts pack eight codes a word, and smaller groups would cost more than they save."""
GROUPS = (32, 64, 128)
"""Columns that may share a step."""
_SMALL_WIDTH = 2048
"""Below, models lose several times as much, and memory is no matter."""
_SMALL_GROUP = 32
_GIB = 1 << 30


def check_method(method: str) -> None:
    """Return if there is such a method.

    Raises:
        InvalidRequest: there is none.
    """
    if method not in METHODS:
        raise InvalidRequest(f"--method {method!r} is unknown; {', '.join(METHODS)} are", "method")


def check_output(output: Path) -> None:
    """Return if a folder can be written there.

    Raises:
        InvalidRequest: something is there, or no folder can be.
    """
    if output.exists() and not output.is_dir():
        raise InvalidRequest(f"--output {output} is a file: name a folder", "output")
    if output.exists() and any(output.iterdir()):
        raise InvalidRequest(f"--output {output} exists and is not empty: name another folder", "output")
    if not output.absolute().parent.is_dir():
        raise InvalidRequest(
            f"--output {output} cannot be made: there is no folder {output.absolute().parent}", "output"
        )


def default_group(model: ModelConfig) -> int:
    """Columns that share a step: 128 as other tools have it, fewer where widths ask for it or the model is small."""
    most = GROUP if model.hidden_size >= _SMALL_WIDTH else _SMALL_GROUP
    return math.gcd(most, *model.input_widths.values())


def check_model(files: ModelFiles, method: str, group_size: int | None = None) -> ModelConfig:
    """Return the model's config if ``method`` can quantize the model on this machine.

    Raises:
        UserError: its files are damaged, or it is of a kind, width or size that this cannot do.
    """
    if files.is_gguf:
        raise InvalidRequest(
            f"{files.path} is a GGUF file, which is quantized already: name a Hugging Face folder", "model"
        )
    model = read_model_config(files)
    if model.architecture not in FAMILIES:
        raise InvalidRequest(
            f"{files.path} holds a model of the family {model.architecture}; quantize knows {', '.join(FAMILIES)}",
            "model",
        )
    if model.quantization is not None:
        raise InvalidRequest(f"{files.path} is quantized already ({model.quantization.format})", "model")
    if method != "fp8":
        _check_widths(files, model, _WIDTH_MULTIPLE if group_size is None else group_size)
    elif group_size is not None:
        raise InvalidRequest(
            f"--group-size is {group_size}, and --method fp8 has a step for each row: leave it out",
            "group_size",
        )
    stored = stored_tensors(files.path)
    check_shapes(model, stored, files.path)
    _check_memory(files, stored)
    return model


def check_calibration(method: str, token_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Return if ``method`` has the calibration tokens that it needs; None: there is no text.

    Raises:
        InvalidRequest: they are too few, or of another model.
    """
    if method == "fp8" and token_ids is None:
        return
    if token_ids is None or len(token_ids) < CHUNK_TOKENS:
        has = "; --method fp8 needs none" if token_ids is None else f", this one has {len(token_ids)}"
        raise InvalidRequest(
            f"--method {method} needs --calibration FILE, a text of {CHUNK_TOKENS} tokens or more like those that will "
            f"be served{has}",
            "calibration",
        )
    if max(token_ids) >= vocab_size:
        raise InvalidRequest(
            f"the tokenizer gives token id {max(token_ids)}, the model's vocabulary has {vocab_size:,}: it is another "
            "model's",
            "calibration",
        )


def _check_widths(files: ModelFiles, model: ModelConfig, group: int) -> None:
    if group not in GROUPS:
        raise InvalidRequest(
            f"--group-size is {group}, it must be one of {', '.join(map(str, GROUPS))}", "group_size"
        )
    for key, width in model.input_widths.items():
        if group > _WIDTH_MULTIPLE and width % group:
            raise InvalidRequest(
                f"{files.path} has {key} = {width}, which groups of {group} do not divide: take --group-size "
                f"{math.gcd(group, width)}",
                "group_size",
            )
    widths = model.input_widths | {"num_key_value_heads * head_dim": model.num_kv_heads * model.head_dim}
    for key, width in widths.items():
        if width % _WIDTH_MULTIPLE:
            raise InvalidRequest(
                f"{files.path} has {key} = {width}, codes of 4 bits need multiples of {_WIDTH_MULTIPLE}: "
                "use --method fp8",
                "method",
            )


def _check_memory(files: ModelFiles, stored: Mapping[str, StoredTensor]) -> None:
    """Weights are read in full as float32, and what is written lies beside them."""
    needed = sum(4 * math.prod(tensor.shape) for tensor in stored.values())
    have = host_memory_bytes()
    if needed > have:
        raise InvalidRequest(
            f"{files.path} takes {needed / _GIB:.3g} GiB as float32, this machine has {have / _GIB:.3g}: quantize it "
            "on a larger one, or serve it with --quantization fp8, int8 or int4, done at load",
            "model",
        )
