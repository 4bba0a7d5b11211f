"""One projection of all experts of a layer, kept as its checkpoint stores it where all experts are stored alike."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.codes import PackedCodes, can_pack, pack_codes
from kernels.experts import Routing, expert_linear
from kernels.quantized_experts import coded_expert_linear, scaled_expert_linear
from kernels.scaled_rows import RowFormat, quantize_rows
from workers.model.quantized.stored_weight import CodedWeight, ScaledWeight, StoredWeight, join


class ExpertWeights(Protocol):
    """Multiplies rows, each by its expert's weight; see ``kernels.experts.expert_linear``."""

    def __call__(self, x: Tensor, routing: Routing, is_spread: bool) -> Tensor:
        """Return [num_pairs, out]."""
        ...


def make_expert_weights(
    parts: list[StoredWeight], num_experts: int, device: torch.device, dtype: torch.dtype
) -> ExpertWeights:
    """Keep ``parts``, the experts in turn and each from top to bottom, for activations of ``dtype``."""
    joined = join(parts)
    whole = joined[0] if len(joined) == 1 else None
    if isinstance(whole, ScaledWeight):
        return ScaledExperts(whole, device, dtype)
    if (
        isinstance(whole, CodedWeight)
        and whole.order is None
        and whole.outliers is None
        and can_pack(whole.codes)
    ):
        return CodedExperts(pack_codes(whole.codes, dtype))
    values = torch.cat([part.dequantize().to(device, dtype) for part in parts])
    return PlainExperts(values.view(num_experts, -1, values.shape[1]))


class PlainExperts:
    """Numbers of the activations' type."""

    def __init__(self, weights: Tensor) -> None:
        """Take [num_experts, out, in]."""
        self._weights = weights

    def __call__(self, x: Tensor, routing: Routing, is_spread: bool) -> Tensor:
        """See ``ExpertWeights``."""
        return expert_linear(x, self._weights, routing, is_spread)


class CodedExperts:
    """Codes, unpacked on the way to use."""

    def __init__(self, packed: PackedCodes) -> None:
        """Take the experts' rows below each other."""
        self._packed = packed

    def __call__(self, x: Tensor, routing: Routing, is_spread: bool) -> Tensor:
        """See ``ExpertWeights``."""
        return coded_expert_linear(x, self._packed, routing, is_spread)


class ScaledExperts:
    """8-bit numbers, times activations rounded to the same type."""

    def __init__(self, weight: ScaledWeight, device: torch.device, dtype: torch.dtype) -> None:
        """Keep ``weight``, the experts' rows below each other, on ``device``."""
        self._form = RowFormat(weight.values.dtype, weight.input_scale)
        self._values = weight.values.to(device).contiguous()
        self._scales = weight.scales.to(device, torch.float32).contiguous()
        self._dtype = dtype

    def __call__(self, x: Tensor, routing: Routing, is_spread: bool) -> Tensor:
        """See ``ExpertWeights``."""
        rows = quantize_rows(x, self._form)
        return scaled_expert_linear(rows, self._values, self._scales, routing, is_spread, self._dtype)
