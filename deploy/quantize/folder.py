"""Quantizes a Hugging Face folder layer by layer into another folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deploy.quantize.calibration import InputStatistics, record_inputs
from deploy.quantize.check import CHUNK_TOKENS, check_calibration, check_method, check_model, check_output
from deploy.quantize.layouts import awq_tensors, fp8_tensors, gptq_tensors, quantization_config
from deploy.quantize.rounding import best_awq_scale, group_of, round_gptq
from kernels.codes import quantize_to_codes
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest

_STATISTICS_BYTES = 1 << 30
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
    token_ids: list[int]
    """Of the calibration text; empty for "fp8", which needs none."""


def quantize_folder(job: Job, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write ``job.target``; ``progress`` gets shares from 0 to 1.

    Raises:
        UserError: a model, method, text or folder that this cannot do; nothing was written.
    """
    from transformers import AutoModelForCausalLM

    check_method(job.method)
    check_output(job.target)
    shape = check_model(job.source, job.method)
    check_calibration(job.method, job.token_ids, shape.vocab_size)
    config = json.loads((job.source.path / "config.json").read_text(encoding="utf-8"))
    try:
        job.target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--output {job.target} cannot be made: {error.strerror}", "output") from error
    model = AutoModelForCausalLM.from_pretrained(job.source.path, dtype=torch.float32).eval()
    chunks = [
        torch.tensor([job.token_ids[start : start + CHUNK_TOKENS]])
        for start in range(0, len(job.token_ids), CHUNK_TOKENS)
    ]
    tensors: dict[str, Tensor] = {}
    layers = list(model.model.layers)
    widths = [layers[0].get_submodule(names[0]).weight.shape[1] for names in _LINEARS]
    group = min(group_of(width) for width in widths)
    # What a pass records must fit beside the model.
    num_at_once = max(1, _STATISTICS_BYTES // sum(2 * 4 * width * width for width in widths))
    seen: dict[str, InputStatistics] = {}
    for index, layer in enumerate(layers):
        if job.method != "fp8" and index % num_at_once == 0:
            chosen = range(index, min(index + num_at_once, len(layers)))
            inputs = {
                f"{i}.{names[0]}": layers[i].get_submodule(names[0]) for i in chosen for names in _LINEARS
            }
            seen = record_inputs(model, inputs, chunks)
        for names, before in zip(_LINEARS, _BEFORE, strict=True):
            linears = [layer.get_submodule(name) for name in names]
            statistics = seen.get(f"{index}.{names[0]}")
            if job.method == "awq" and statistics is not None:
                _fold_scale(layer.get_submodule(before), [linear.weight for linear in linears], statistics)
        for names in _LINEARS:
            for name in names:
                linear, prefix = layer.get_submodule(name), f"model.layers.{index}.{name}."
                statistics = seen.get(f"{index}.{names[0]}")
                encoded = _encode(job.method, linear.weight.detach(), statistics, group)
                tensors |= {prefix + part: tensor for part, tensor in encoded.items()}
                if linear.bias is not None:
                    tensors[prefix + "bias"] = linear.bias.detach()
        progress((index + 1) / len(layers))
    _write(job, config, model, tensors, group)


def _fold_scale(before: nn.Module, weights: list[Tensor], seen: InputStatistics) -> None:
    """Scale columns up and what writes them down, where the two have equal widths."""
    writer = before.weight
    assert isinstance(writer, Tensor), "norms and projections have weights"
    if writer.shape[0] != weights[0].shape[1]:
        return  # with grouped queries one row of v feeds several columns of the output projection
    with torch.no_grad():
        _divide(
            writer,
            before,
            weights,
            best_awq_scale(weights, seen.magnitudes / seen.count, seen.gram + seen.held_out),
        )


def _divide(writer: Tensor, before: nn.Module, weights: list[Tensor], scale: Tensor) -> None:
    for weight in weights:
        weight.mul_(scale)
    writer.div_(scale if writer.dim() == 1 else scale[:, None])
    bias = getattr(before, "bias", None)
    if isinstance(bias, Tensor):
        bias.div_(scale)


def _encode(method: str, weight: Tensor, seen: InputStatistics | None, group: int) -> dict[str, Tensor]:
    if method == "fp8":
        return fp8_tensors(weight)
    if method == "awq":
        codes = quantize_to_codes(weight, 4, group)
        return awq_tensors(codes)
    assert seen is not None, "GPTQ is calibrated"
    return gptq_tensors(round_gptq(weight, seen.gram, seen.held_out).regroup(group))


def _write(
    job: Job, config: dict[str, object], model: nn.Module, tensors: dict[str, Tensor], group: int
) -> None:
    stems = {name.rpartition(".")[0] for name in tensors}
    is_tied = bool(config.get("tie_word_embeddings"))
    for name, value in model.state_dict().items():
        if name.rpartition(".")[0] in stems or (is_tied and name == "lm_head.weight"):
            continue
        tensors[name] = value.to(torch.bfloat16)
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
