"""Runs the kernels of quantized weights and of experts in Triton's interpreter; prints the largest errors as JSON.

A program of its own, as ``interpret_kernels.py`` is. FP8 rounding is not compared: the interpreter rounds otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kernels import (
    coded_linear,
    experts,
    nibble_linear,
    outliers,
    quantized_experts,
    scaled_linear,
    scaled_rows,
    silu_mul,
)
from kernels.codes import Codes, PackedCodes, dequantize_ref, pack_codes, unpack_codes
from kernels.splits import ProductTiles

FLOAT_TYPES = (torch.float32, torch.float16)
Case = tuple[str, torch.Tensor, torch.Tensor]

# kind, rows, columns, bits, group, tokens, tiles
SHAPES = (
    ("plain", 40, 96, 4, 32, 3, None),
    ("zeros", 64, 256, 4, 128, 17, ProductTiles(32, 16, 1, 1, 4, 2)),
    ("offsets", 40, 160, 4, 32, 5, ProductTiles(16, 16, 2, 2, 4, 2)),
    ("zeros", 40, 96, 8, 32, 3, None),
    ("plain", 33, 64, 6, 16, 2, None),
    ("offsets", 16, 96, 5, 32, 1, None),
    ("table", 32, 64, 3, 64, 4, None),
    ("shared table", 32, 128, 4, 64, 4, None),
)


def make_codes(kind: str, rows: int, columns: int, bits: int, group: int) -> Codes:
    """Random codes with what ``kind`` names."""
    groups = columns // group
    zeros = offsets = table = None
    scales = None if kind == "table" else torch.rand(rows, groups) * 0.1 + 0.01
    if kind == "zeros":
        zeros = torch.randint(0, (1 << bits) + 1, (rows, groups), dtype=torch.int16)
    if kind == "offsets":
        offsets = torch.randn(rows, groups)
    if "table" in kind:
        table = torch.randn(rows if kind == "table" else 1, 1 << bits)
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    return Codes(values, bits, group, scales, zeros, offsets, table)


def coded_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Products with codes, and codes unpacked."""
    for kind, rows, columns, bits, group, tokens, tiles in SHAPES:
        packed = pack_codes(make_codes(kind, rows, columns, bits, group), dtype)
        x, bias = torch.randn(tokens, columns, dtype=dtype), torch.randn(rows, dtype=dtype)
        name = f"{kind} of {bits} bits {dtype}"
        got = coded_linear._launch(x, packed, bias, None, tiles)
        yield f"coded_linear {name}", got, coded_linear.coded_linear_ref(x, packed, bias)
        unpacked = coded_linear._launch_unpack(packed, dtype)
        yield f"unpack {name}", unpacked, dequantize_ref(unpack_codes(packed))
        if nibble_linear.can_multiply(packed):
            yield from nibble_cases(name, x, packed, bias, tiles)


def nibble_cases(
    name: str, x: torch.Tensor, packed: PackedCodes, bias: torch.Tensor, tiles: ProductTiles | None
) -> Iterator[Case]:
    """Products of codes taken for FP8 numbers."""
    form = scaled_rows.RowFormat(scaled_rows.FLOAT8, sum_group=packed.group)
    rows = scaled_rows.split_rows_ref(x, form)
    got = nibble_linear._launch(rows, packed, bias, x.dtype, tiles)
    yield f"nibble_linear {name}", got, nibble_linear.nibble_linear_ref(rows, packed, bias, x.dtype)


def scaled_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rows rounded to INT8, after a norm and a gate as well, and products of 8-bit numbers."""
    form = scaled_rows.RowFormat(torch.int8)
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((5, 96), (5, 96), (96,)))
    cases = {"": scaled_rows._launch(x, None, None, 0.0, form, 96)}
    want = {"": scaled_rows.split_rows_ref(x, form)}
    residuals = residual.clone(), residual.clone()
    cases["norm"] = scaled_rows._launch(x, residuals[0], weight, 1e-5, form, 96)
    want["norm"] = scaled_rows.rms_norm_rows(x, residuals[1], weight, 1e-5, form)
    yield f"residual {dtype}", residuals[0], residuals[1]
    cases["gate"] = scaled_rows._launch(x, None, None, 0.0, form, 48, is_gated=True)
    want["gate"] = scaled_rows.silu_mul_rows(x, form)
    for name, rows in cases.items():
        yield f"rows {name} {dtype}", rows.values.float(), want[name].values.float()
        yield f"row scales {name} {dtype}", rows.scales, want[name].scales
    for kind in (torch.int8, scaled_rows.FLOAT8):
        values, scales = scaled_rows.quantize_rows_ref(torch.randn(72, 96), kind)
        rows = scaled_rows.split_rows_ref(x, scaled_rows.RowFormat(kind))
        bias = torch.randn(72, dtype=dtype)
        for tiles in (None, ProductTiles(32, 16, 2, 32, 4, 2)):
            got = scaled_linear._launch(rows, values, scales, bias, dtype, tiles)
            wanted = scaled_linear.scaled_linear_ref(rows, values, scales, bias, dtype)
            yield f"scaled_linear {kind} {tiles is None} {dtype}", got, wanted


def other_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Outliers, GeGLU, experts."""
    weight = outliers.sparse_rows(
        torch.randint(0, 40, (90,)), torch.randint(0, 33, (90,)), torch.randn(90), 40
    )
    x = torch.randn(9, 33, dtype=dtype)
    sums = torch.randn(9, 40, dtype=dtype)
    want = sums.clone()
    outliers._launch(x, weight, sums)
    outliers.add_sparse_ref(x, weight, want)
    yield f"add_sparse {dtype}", sums, want
    gate_up = torch.randn(3, 2 * 50, dtype=dtype)
    yield f"gelu_mul {dtype}", silu_mul._launch(gate_up, is_gelu=True), silu_mul.gelu_mul_ref(gate_up)
    for num_tokens, num_experts, top_k in ((5, 4, 2), (1, 8, 3), (40, 2, 1)):
        routing = experts.route(torch.randn(num_tokens, num_experts), top_k, True)
        x = torch.randn(num_tokens, 48, dtype=dtype)
        up, down = (
            torch.randn(num_experts, 24, 48, dtype=dtype),
            torch.randn(num_experts, 48, 24, dtype=dtype),
        )
        hidden = experts.expert_linear_ref(x, up, routing, is_spread=False)
        yield f"experts {num_tokens} {dtype}", experts._launch(x, up, routing, False), hidden
        spread = experts.expert_linear_ref(hidden, down, routing, is_spread=True)
        yield f"experts spread {num_tokens} {dtype}", experts._launch(hidden, down, routing, True), spread


def quantized_expert_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Experts of codes and of 8-bit numbers, both ways of placing their results."""
    num_experts, num_out, width = 4, 40, 96
    for num_tokens, top_k in ((5, 2), (1, 3)):
        routing = experts.route(torch.randn(num_tokens, num_experts), top_k, True)
        for is_spread in (False, True):
            x = torch.randn(num_tokens * (top_k if is_spread else 1), width, dtype=dtype)
            for kind, bits in (("zeros", 4), ("offsets", 4), ("plain", 8)):
                packed = pack_codes(make_codes(kind, num_experts * num_out, width, bits, 32), dtype)
                got = quantized_experts._launch_coded(x, packed, routing, is_spread)
                want = quantized_experts.coded_expert_linear_ref(x, packed, routing, is_spread)
                yield f"experts of {kind} {bits} {num_tokens} {is_spread} {dtype}", got, want
            for kind in (torch.int8, scaled_rows.FLOAT8):
                values, scales = scaled_rows.quantize_rows_ref(
                    torch.randn(num_experts * num_out, width), kind
                )
                rows = scaled_rows.split_rows_ref(x, scaled_rows.RowFormat(kind))
                args = (rows, values, scales, routing, is_spread, dtype)
                got = quantized_experts._launch_scaled(*args)
                want = quantized_experts.scaled_expert_linear_ref(*args)
                yield f"experts of {kind} {num_tokens} {is_spread} {dtype}", got, want


def main() -> None:
    """Print ``{case: error}``, the error relative to the reference's largest value."""
    torch.manual_seed(0)
    errors = {}
    for dtype in FLOAT_TYPES:
        for cases in (coded_cases, scaled_cases, other_cases, quantized_expert_cases):
            for name, got, want in cases(dtype):
                errors[name] = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
