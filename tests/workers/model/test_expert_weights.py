"""Experts keep what their checkpoint stores, and multiply by what it stands for."""

from __future__ import annotations

import pytest
import torch

from kernels.codes import quantize_to_codes, quantize_to_spans
from kernels.experts import expert_linear_ref, route
from kernels.scaled_rows import FLOAT8, quantize_rows_ref
from workers.model.quantized.expert_weights import (
    CodedExperts,
    PlainExperts,
    ScaledExperts,
    make_expert_weights,
)
from workers.model.quantized.stored_weight import CodedWeight, DenseWeight, ScaledWeight, StoredWeight

NUM_EXPERTS, OUT, WIDTH = 3, 24, 64
CPU = torch.device("cpu")


def stored(kind: str, weight: torch.Tensor) -> StoredWeight:
    if kind == "awq":
        return CodedWeight(quantize_to_codes(weight, 4, 32))
    if kind == "int4":
        return CodedWeight(quantize_to_spans(weight, 4, 32))
    if kind == "gptq with desc_act":
        return CodedWeight(quantize_to_codes(weight, 4, 32), order=torch.randperm(WIDTH))
    if kind in ("fp8", "int8"):
        return ScaledWeight(*quantize_rows_ref(weight, FLOAT8 if kind == "fp8" else torch.int8))
    return DenseWeight(weight)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("awq", CodedExperts),
        ("int4", CodedExperts),
        ("fp8", ScaledExperts),
        ("int8", ScaledExperts),
        ("gptq with desc_act", PlainExperts),
        ("full", PlainExperts),
    ],
)
@pytest.mark.parametrize("is_spread", [False, True])
def test_experts_stay_as_they_are_stored(kind: str, kept: type, is_spread: bool) -> None:
    torch.manual_seed(0)
    # Two parts an expert, as gate and up are.
    parts = [stored(kind, torch.randn(OUT // 2, WIDTH)) for _ in range(2 * NUM_EXPERTS)]
    routing = route(torch.randn(5, NUM_EXPERTS), 2, True)
    x = torch.randn(10 if is_spread else 5, WIDTH)

    experts = make_expert_weights(parts, NUM_EXPERTS, CPU, torch.float32)

    assert type(experts) is kept
    weights = torch.cat([part.dequantize() for part in parts]).view(NUM_EXPERTS, OUT, WIDTH)
    want = expert_linear_ref(x, weights, routing, is_spread)
    # Where weights are 8-bit numbers, activations are rounded to them as well.
    limit = 0.05 if kept is ScaledExperts else 1e-5
    assert (experts(x, routing, is_spread) - want).abs().max() < limit * want.abs().max()


def test_experts_stored_in_several_ways_are_multiplied_in_full() -> None:
    parts = [stored("awq" if index else "fp8", torch.randn(OUT, WIDTH)) for index in range(NUM_EXPERTS)]

    assert isinstance(make_expert_weights(parts, NUM_EXPERTS, CPU, torch.float32), PlainExperts)
