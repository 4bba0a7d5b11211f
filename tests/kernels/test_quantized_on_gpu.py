"""Kernels of quantized weights and experts agree with their references on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import experts, nibble_linear, quantized_experts
from kernels.coded_linear import coded_linear, coded_linear_ref, unpack
from kernels.codes import Codes, PackedCodes, dequantize_ref, pack_codes, unpack_codes
from kernels.outliers import add_sparse, add_sparse_ref, sparse_rows
from kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_ref
from kernels.prefill_attention import prefill_attention, prefill_attention_ref
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_ref
from kernels.scaled_linear import scaled_linear, scaled_linear_ref
from kernels.scaled_rows import FLOAT8, RowFormat, quantize_rows, quantize_rows_ref, split_rows_ref
from kernels.silu_mul import gelu_mul, gelu_mul_ref

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
KINDS = [("zeros", 4, 128), ("offsets", 4, 32), ("plain", 4, 32), ("table", 4, 128), ("zeros", 8, 128)]


def random_codes(kind: str, bits: int, group: int, rows: int = 480, columns: int = 1152) -> PackedCodes:
    shape = (rows, columns // group)
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, device="cuda")
    scales = torch.rand(shape, device="cuda") * 0.01 + 0.001
    zeros = offsets = table = None
    if kind == "zeros":
        zeros = torch.randint(0, 1 << bits, shape, dtype=torch.int16, device="cuda")
    if kind == "offsets":
        offsets = torch.randn(shape, device="cuda") * 0.01
    if kind == "table":
        table = torch.randn(rows, 1 << bits, device="cuda") * 0.02
    return pack_codes(
        Codes(values, bits, group, None if kind == "table" else scales, zeros, offsets, table), BF16
    )


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


@pytest.mark.parametrize(("kind", "bits", "group"), KINDS)
@pytest.mark.parametrize("num_tokens", [1, 17, 64, 100, 300])
def test_codes(kind: str, bits: int, group: int, num_tokens: int) -> None:
    packed = random_codes(kind, bits, group)
    x = torch.randn(num_tokens, 1152, device="cuda", dtype=BF16)
    bias = torch.randn(480, device="cuda", dtype=BF16)

    assert worst(coded_linear(x, packed, bias), coded_linear_ref(x, packed, bias)) < 8e-3
    assert worst(unpack(packed, BF16), dequantize_ref(unpack_codes(packed))) < 4e-3
    if nibble_linear.can_multiply(packed) and nibble_linear.has_float8(x.device):
        rows = quantize_rows(x, RowFormat(FLOAT8, sum_group=packed.group))
        got = nibble_linear.nibble_linear(rows, packed, bias, torch.float32)
        want = x.float() @ dequantize_ref(unpack_codes(packed)).T + bias.float()
        assert worst(got, want) < 3e-3


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
@pytest.mark.parametrize("num_tokens", [1, 20, 64, 300])
def test_rows_and_products_of_8_bits(dtype: torch.dtype, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 1152, device="cuda", dtype=BF16)
    weight, scales = quantize_rows_ref(torch.randn(480, 1152, device="cuda"), dtype)
    bias = torch.randn(480, device="cuda", dtype=BF16)

    rows, want = quantize_rows(x, RowFormat(dtype)), split_rows_ref(x, RowFormat(dtype))

    assert float((rows.values.float() != want.values.float()).float().mean()) < 1e-3
    torch.testing.assert_close(rows.scales, want.scales)
    got = scaled_linear(rows, weight, scales, bias)
    assert worst(got, scaled_linear_ref(rows, weight, scales, bias, BF16)) < 8e-3


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 64, 4), (5, 8, 2), (300, 8, 2)])
def test_experts(num_tokens: int, num_experts: int, top_k: int) -> None:
    routing = experts.route(torch.randn(num_tokens, num_experts, device="cuda"), top_k, True)
    x = torch.randn(num_tokens, 256, device="cuda", dtype=BF16)
    up, down = (
        torch.randn(num_experts, *shape, device="cuda", dtype=BF16) * 0.05
        for shape in ((200, 256), (256, 200))
    )

    hidden = experts.expert_linear_ref(x, up, routing, is_spread=False)

    assert worst(experts.expert_linear(x, up, routing, is_spread=False), hidden) < 8e-3
    want = experts.expert_linear_ref(hidden, down, routing, is_spread=True)
    assert worst(experts.expert_linear(hidden, down, routing, is_spread=True), want) < 8e-3


def test_outliers_and_geglu() -> None:
    rows, columns = (
        torch.randint(0, 480, (3000,), device="cuda"),
        torch.randint(0, 1152, (3000,), device="cuda"),
    )
    weight = sparse_rows(rows, columns, torch.randn(3000, device="cuda"), 480)
    x = torch.randn(9, 1152, device="cuda", dtype=BF16)
    out, want = torch.zeros(2, 9, 480, device="cuda", dtype=BF16)

    add_sparse(x, weight, out)
    add_sparse_ref(x, weight, want)

    assert worst(out, want) < 8e-3
    assert worst(gelu_mul(x), gelu_mul_ref(x)) < 8e-3


@pytest.mark.parametrize("is_spread", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 64, 4), (5, 8, 2), (300, 8, 2)])
def test_quantized_experts(num_tokens: int, num_experts: int, top_k: int, is_spread: bool) -> None:
    routing = experts.route(torch.randn(num_tokens, num_experts, device="cuda"), top_k, True)
    x = torch.randn(num_tokens * (top_k if is_spread else 1), 384, device="cuda", dtype=BF16)
    for kind, bits, group in KINDS:
        packed = random_codes(kind, bits, group, rows=num_experts * 200, columns=384)
        got = quantized_experts.coded_expert_linear(x, packed, routing, is_spread)
        assert worst(got, quantized_experts.coded_expert_linear_ref(x, packed, routing, is_spread)) < 8e-3
    for dtype in (torch.int8, FLOAT8):
        weight, scales = quantize_rows_ref(torch.randn(num_experts * 200, 384, device="cuda"), dtype)
        args = (quantize_rows(x, RowFormat(dtype)), weight, scales, routing, is_spread, BF16)
        got = quantized_experts.scaled_expert_linear(*args)
        assert worst(got, quantized_experts.scaled_expert_linear_ref(*args)) < 8e-3


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 4.0)])
def test_a_cache_of_e4m3(scales: tuple[float, float]) -> None:
    num_tokens, heads, kv_heads, size = 70, 8, 2, 128
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * size, device="cuda", dtype=BF16) * 3
    positions, slots = torch.arange(num_tokens, device="cuda"), torch.arange(num_tokens, device="cuda") + 16
    turn = torch.randn(num_tokens, size, device="cuda")
    got, want = torch.zeros(2, 6, 1, 2, kv_heads, 16, size, dtype=torch.uint8, device="cuda").view(FLOAT8)
    q = rope_kv_write(qkv, positions, slots, turn, got, 0, kv_scales=scales)
    rope_kv_write_ref(qkv, positions, slots, turn, want, 0, kv_scales=scales)

    assert (
        (got.float() - want.float()).abs() <= want.float().abs() / 8 + 2**-9
    ).all()  # products may be fused
    table = torch.arange(1, 6, dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    args = (q, got, 0, table, starts, lens, 0.05)
    assert worst(prefill_attention(*args), prefill_attention_ref(*args)) < 2e-2
    last = q[-1:].contiguous()
    decoded = paged_decode_attention(last, got, 0, table, lens, 0.05, num_tokens)
    assert worst(decoded, paged_decode_attention_ref(last, got, 0, table, lens, 0.05)) < 2e-2
