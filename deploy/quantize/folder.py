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
from deploy.quantize.layouts import awq_tensors, fp8_tensors, gptq_tensors, quantization_config
from deploy.quantize.rounding import best_awq_scale, group_of, round_gptq
from kernels.codes import quantize_to_codes
from workers.engine.errors import InvalidRequest

METHODS = ("fp8", "awq", "gptq")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose layers have the names and the norms that AWQ's scales are folded into."""
_CHUNK_TOKENS = 512
_WIDTH_MULTIPLE = 32
"""Of rows and columns: the layouts pack eight codes a word, and smaller groups would cost more than they save."""
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

    source: Path
    target: Path
    method: str
    token_ids: list[int]
    """Of the calibration text; empty for "fp8", which needs none."""


def quantize_folder(job: Job, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write ``job.target``; ``progress`` gets shares from 0 to 1.

    Raises:
        InvalidRequest: a family or method that this does not know, or too little calibration text.
    """
    from transformers import AutoModelForCausalLM

    config = json.loads((job.source / "config.json").read_text(encoding="utf-8"))
    _check(job, config)
    model = AutoModelForCausalLM.from_pretrained(job.source, dtype=torch.float32).eval()
    chunks = [
        torch.tensor([job.token_ids[start : start + _CHUNK_TOKENS]])
        for start in range(0, len(job.token_ids), _CHUNK_TOKENS)
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


def _check(job: Job, config: dict[str, object]) -> None:
    if job.method not in METHODS:
        raise InvalidRequest(f"method {job.method!r} is unknown; {', '.join(METHODS)} are", "method")
    if config.get("model_type") not in FAMILIES:
        raise InvalidRequest(
            f"{job.source} is a {config.get('model_type')}; quantize knows {', '.join(FAMILIES)}", "model"
        )
    if config.get("quantization_config"):
        raise InvalidRequest(f"{job.source} is quantized already", "model")
    if job.method == "fp8":
        return
    for name in ("hidden_size", "intermediate_size"):
        width = config.get(name)
        if isinstance(width, int) and width % _WIDTH_MULTIPLE:
            raise InvalidRequest(
                f"{job.source} has {name} {width}, codes of 4 bits need multiples of {_WIDTH_MULTIPLE}: "
                "use --method fp8",
                "method",
            )
    if not job.token_ids:
        raise InvalidRequest(
            f"--method {job.method} needs --calibration FILE, a text of {_CHUNK_TOKENS} tokens or more like those that "
            "will be served; --method fp8 needs none",
            "calibration",
        )
    if len(job.token_ids) < _CHUNK_TOKENS:
        raise InvalidRequest(
            f"{job.method} needs a calibration text of {_CHUNK_TOKENS} tokens or more, "
            f"this one has {len(job.token_ids)}",
            "calibration",
        )


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
    job.target.mkdir(parents=True, exist_ok=True)
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
    for path in job.source.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and path.name not in (
            "config.json",
            "model.safetensors.index.json",
        ):
            shutil.copy(path, job.target / path.name)
