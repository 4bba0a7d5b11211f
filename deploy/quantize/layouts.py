"""Tensors and config of one quantized layer, as AutoAWQ, AutoGPTQ and compressed-tensors write them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.scaled_rows import FLOAT8
from workers.model.quantized.bit_packing import pack_bits

METHODS = ("fp8", "awq", "gptq")
"""What can be written."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns comes first in a word, and so on."""


def awq_tensors(codes: Codes) -> dict[str, Tensor]:
    """Codes as AutoAWQ's GEMM layout."""
    scales, zeros = _parts(codes)

    def pack(values: Tensor) -> Tensor:
        ordered = values.t().reshape(values.shape[1], -1, 8)[..., list(_AWQ_ORDER)]
        return pack_bits(ordered.reshape(values.shape[1], -1), 4, 1).contiguous()

    return {"qweight": pack(codes.values), "qzeros": pack(zeros), "scales": scales.t().half().contiguous()}


def gptq_tensors(codes: Codes) -> dict[str, Tensor]:
    """Codes as AutoGPTQ's first layout, zero points less one."""
    scales, zeros = _parts(codes)
    width = codes.shape[1]
    stored = (zeros.to(torch.int16) - 1) & 15
    return {
        "qweight": pack_bits(codes.values.t(), 4, 0).contiguous(),
        "qzeros": pack_bits(stored.t(), 4, 1).contiguous(),
        "scales": scales.t().half().contiguous(),
        "g_idx": (torch.arange(width) // codes.group).to(torch.int32),
    }


def fp8_tensors(scales: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """A weight of FP8 numbers times ``scales`` [out] as compressed-tensors' float-quantized layout."""
    return {
        "weight": (weight / scales[:, None]).to(FLOAT8),
        "weight_scale": scales[:, None].contiguous(),
    }


def quantization_config(method: str, group: int) -> dict[str, object]:
    """What config.json says of it."""
    if method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": False,
            "sym": False,
            "checkpoint_format": "gptq",
        }
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
    }


def _parts(codes: Codes) -> tuple[Tensor, Tensor]:
    assert codes.scales is not None, "codes without a table have scales"
    assert codes.zeros is not None, "rounding gives zero points"
    return codes.scales.float(), codes.zeros.to(torch.uint8)
