"""Quantizes a Hugging Face folder layer by layer into another folder."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deploy.quantize.calibration import CalibrationFlow, InputStatistics, Rounding
from deploy.quantize.check import (
    CHUNK_TOKENS,
    check_calibration,
    check_method,
    check_model,
    check_output,
    default_group,
)
from deploy.quantize.grids import CodeGrid, Float8Grid
from deploy.quantize.layouts import awq_tensors, fp8_tensors, gptq_tensors, quantization_config
from deploy.quantize.rounding import best_awq_scale, round_with_feedback
from kernels.scaled_rows import FLOAT8, quantize_rows_ref
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest

_LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers by the input that they share."""
_BEFORE = ("input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj")
"""What writes each input, and can divide it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to quantize, how, and where to."""

    source: ModelFiles
    """A Hugging Face folder."""
    target: Path
    method: str
    token_ids: list[int] | None
    """Of the calibration text; None for "fp8" alone, which then rounds to nearest."""
    group_size: int | None = None
    """Columns that share a step of 4 bits; None: ``default_group``."""


def quantize_folder(job: Job, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write ``job.target``; ``progress`` gets 0 once all is checked, then shares up to 1.

    Raises:
        UserError: a model, method, text or folder that this cannot do; nothing was written, or what was is gone.
    """
    check_method(job.method)
    check_output(job.target)
    shape = check_model(job.source, job.method, job.group_size)
    check_calibration(job.method, job.token_ids, shape.vocab_size)
    with _made(job.target):
        progress(0.0)
        _quantize(job, job.group_size or default_group(shape), progress)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make ``folder``, or find it empty; leave it as it was if what follows fails."""
    was_there = folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--output {folder} cannot be made: {error.strerror}", "output") from error
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if not was_there:
            folder.rmdir()
        raise


def _quantize(job: Job, group: int, progress: Callable[[float], None]) -> None:
    from transformers import AutoModelForCausalLM

    config = json.loads((job.source.path / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(job.source.path, dtype=torch.float32).eval()
    _check_finite(
        model.named_parameters(), f"of {job.source.path} holds NaN or infinity: its weights are damaged"
    )
    token_ids = job.token_ids or []
    chunks = [
        torch.tensor([token_ids[start : start + CHUNK_TOKENS]])
        for start in range(0, len(token_ids), CHUNK_TOKENS)
    ]
    layers = list(model.model.layers)
    flow = CalibrationFlow(model, layers[0], chunks, _input_rounding(job.method)) if chunks else None
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        encoded = _round_layer(layer, job.method, group, flow)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in encoded.items()}
        progress((index + 1) / len(layers))
    _write(job, config, model, tensors, group)


def _check_finite(tensors: Iterable[tuple[str, Tensor]], otherwise: str) -> None:
    for name, tensor in tensors:
        # Codes are integers, and what is cut off to 8 bits is finite.
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise InvalidRequest(f"tensor {name} {otherwise}", "model")


def _input_rounding(method: str) -> Rounding | None:
    """What the product does to its inputs, which weights are then calibrated with."""

    def round_rows(inputs: Tensor) -> Tensor:
        values, scales = quantize_rows_ref(inputs.reshape(-1, inputs.shape[-1]), FLOAT8)
        return (values.float() * scales[:, None]).view(inputs.shape)

    return round_rows if method == "fp8" else None


@torch.no_grad()
def _round_layer(
    layer: nn.Module, method: str, group: int, flow: CalibrationFlow | None
) -> dict[str, Tensor]:
    """Round the projections of ``layer`` in place; return what is stored of them, by name."""
    if method == "awq":
        assert flow is not None, "4 bits are calibrated"
        for names, before in zip(_LINEARS, _BEFORE, strict=True):
            _fold_scale(layer, names, layer.get_submodule(before), group, flow)
    full = layer if flow is None else copy.deepcopy(layer)
    stored: dict[str, Tensor] = {}
    for names in _LINEARS:
        linears = _linears(layer, names)
        weight = torch.cat([linear.weight for linear in linears])
        # After what comes before in the layer has been rounded.
        seen = flow.record(layer, full, names[0]) if flow is not None else None
        rounded, encode = _rounded(method, weight, group, seen)
        start = 0
        for name, linear in zip(names, linears, strict=True):
            rows = range(start, start + linear.out_features)
            start = rows.stop
            linear.weight.copy_(rounded[rows.start : rows.stop])
            stored |= {f"{name}.{part}": tensor for part, tensor in encode(rows).items()}
            if linear.bias is not None:
                stored[f"{name}.bias"] = linear.bias.clone()
    if flow is not None:
        flow.pass_through(layer, full)
    return stored


def _linears(layer: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    found = [layer.get_submodule(name) for name in names]
    assert all(isinstance(one, nn.Linear) for one in found), "the families' projections are linear layers"
    return found  # type: ignore[return-value]


_Encode = Callable[[range], dict[str, Tensor]]
"""From some rows of a rounded weight to the tensors of their layer."""


def _rounded(method: str, weight: Tensor, group: int, seen: InputStatistics | None) -> tuple[Tensor, _Encode]:
    """The weight as it will be read, and how its rows are stored."""
    if method == "fp8":
        rounded, float8 = _rounded_float8(weight, seen)
        return rounded, lambda rows: fp8_tensors(
            float8.scales[rows.start : rows.stop], rounded[rows.start : rows.stop]
        )
    assert seen is not None, "4 bits are calibrated"
    importance = (seen.gram + seen.held_out).diagonal()
    least_zero, tensors_of = (1, gptq_tensors) if method == "gptq" else (0, awq_tensors)
    rounded, grid = round_with_feedback(
        weight, lambda aim: CodeGrid(aim, group, importance, least_zero), seen
    )
    return rounded, lambda rows: tensors_of(grid.codes(rounded).take_rows(rows))


def _rounded_float8(weight: Tensor, seen: InputStatistics | None) -> tuple[Tensor, Float8Grid]:
    if seen is not None:
        return round_with_feedback(weight, Float8Grid, seen)
    grid = Float8Grid(weight)
    return grid.rounded(weight), grid


def _fold_scale(
    layer: nn.Module, names: tuple[str, ...], before: nn.Module, group: int, flow: CalibrationFlow
) -> None:
    """Scale columns up and what writes them down, where the two have equal widths: nothing is computed otherwise."""
    linears = _linears(layer, names)
    writer = before.weight
    assert isinstance(writer, Tensor), "norms and projections have weights"
    if writer.shape[0] != linears[0].in_features:
        return  # with grouped queries one row of v feeds several columns of the output projection
    seen = flow.record(layer, layer, names[0])
    weight = torch.cat([linear.weight for linear in linears])
    scale = best_awq_scale(weight, group, seen.magnitudes / seen.count, seen.gram + seen.held_out)
    for linear in linears:
        linear.weight.mul_(scale)
    writer.div_(scale if writer.dim() == 1 else scale[:, None])
    bias = getattr(before, "bias", None)
    if isinstance(bias, Tensor):
        bias.div_(scale)


def _write(
    job: Job, config: dict[str, object], model: nn.Module, tensors: dict[str, Tensor], group: int
) -> None:
    stems = {name.rpartition(".")[0] for name in tensors}
    is_tied = bool(config.get("tie_word_embeddings"))
    for name, value in model.state_dict().items():
        if name.rpartition(".")[0] in stems or (is_tied and name == "lm_head.weight"):
            continue
        tensors[name] = value.to(torch.bfloat16)
    _check_finite(
        tensors.items(),
        f"goes beyond the numbers in which --method {job.method} stores it: the weights are far too large",
    )
    save_file({name: value.contiguous() for name, value in tensors.items()}, job.target / "model.safetensors")
    quantized = config | {"quantization_config": quantization_config(job.method, group)}
    if "dtype" not in quantized:
        quantized.setdefault("torch_dtype", "bfloat16")
    (job.target / "config.json").write_text(json.dumps(quantized, indent=2), encoding="utf-8")
    for path in job.source.path.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and path.name not in (
            "config.json",
            "model.safetensors.index.json",
        ):
            shutil.copy(path, job.target / path.name)
