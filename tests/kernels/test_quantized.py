"""Codes, rows of 8 bits, outliers and experts mean what they say, on a CPU."""

from __future__ import annotations

import pytest
import torch

from kernels.coded_linear import coded_linear
from kernels.codes import (
    Codes,
    dequantize_ref,
    pack_codes,
    quantize_to_codes,
    quantize_to_spans,
    unpack_codes,
)
from kernels.experts import expert_linear, route
from kernels.nibble_linear import can_multiply, nibble_linear
from kernels.outliers import add_sparse, sparse_rows
from kernels.scaled_linear import scaled_linear
from kernels.scaled_rows import FLOAT8, RowFormat, quantize_rows, rms_norm_rows, silu_mul_rows
from kernels.silu_mul import gelu_mul


def make_codes(bits: int = 4, group: int = 32, rows: int = 24, columns: int = 96) -> Codes:
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    shape = (rows, columns // group)
    zeros = torch.randint(0, 1 << bits, shape, dtype=torch.int16)
    return Codes(values, bits, group, torch.rand(shape), zeros)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("group", [16, 32, 96])
def test_packing_loses_nothing(bits: int, group: int) -> None:
    codes = make_codes(bits, group)

    back = unpack_codes(pack_codes(codes, torch.float32))

    assert torch.equal(dequantize_ref(back), dequantize_ref(codes))


def test_four_bits_are_packed_two_a_byte() -> None:
    packed = pack_codes(make_codes(4, 32, 24, 128), torch.bfloat16)

    assert packed.codes.shape == (24, 64)
    assert packed.num_bytes == 24 * 64 + 4 * 24 * (2 + 1)


def test_groups_that_no_kernel_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 12 columns"):
        pack_codes(make_codes(4, 12), torch.float32)


def test_rounding_to_codes_keeps_zero_and_half_a_step() -> None:
    weight = torch.randn(16, 64)
    weight[:, ::7] = 0.0

    codes = quantize_to_codes(weight, 4, 32)
    back = dequantize_ref(codes)

    assert bool((back[:, ::7] == 0).all())
    assert codes.scales is not None
    steps = codes.scales.repeat_interleave(32, 1)
    assert bool(((back - weight).abs() <= steps * 0.51).all())


def test_spans_keep_what_lies_on_a_grid_with_any_offset() -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (8, 2, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * torch.rand(8, 2, 1) - torch.rand(8, 2, 1)).view(8, 64)

    back = dequantize_ref(quantize_to_spans(weight, 4, 32))

    torch.testing.assert_close(back, weight)
    assert not torch.allclose(dequantize_ref(quantize_to_codes(weight, 4, 32)), weight, rtol=0.1)


def test_spans_cost_less_than_zero_points_on_other_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512)

    spans, zeros = (f(weight, 4, 32) for f in (quantize_to_spans, quantize_to_codes))

    loss = [float((dequantize_ref(codes) - weight).square().mean()) for codes in (spans, zeros)]
    assert loss[0] < 0.97 * loss[1]


def test_a_product_with_codes_is_the_product_with_what_they_stand_for() -> None:
    codes, x, bias = make_codes(), torch.randn(5, 96), torch.randn(24)

    out = coded_linear(x, pack_codes(codes, torch.float32), bias)

    torch.testing.assert_close(out, x @ dequantize_ref(codes).T + bias)
    with pytest.raises(ValueError, match="96 columns"):
        coded_linear(x[:, :64].contiguous(), pack_codes(codes, torch.float32))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_activations_of_two_fp8_numbers_are_as_exact_as_bfloat16(scale: float) -> None:
    codes = quantize_to_codes(torch.randn(64, 256) * 0.02, 4, 128)
    packed = pack_codes(codes, torch.bfloat16)
    x = torch.randn(32, 256) * scale
    x[:, 5] *= 100.0  # outliers, as models have them
    exact = x.double() @ dequantize_ref(unpack_codes(packed)).double().T

    rows = quantize_rows(x, RowFormat(FLOAT8, sum_group=128))
    error = (nibble_linear(rows, packed, dtype=torch.float32) - exact).norm() / exact.norm()
    usual = (x.bfloat16().double() @ dequantize_ref(unpack_codes(packed)).double().T - exact).norm()

    assert can_multiply(packed)
    assert error < max(float(usual / exact.norm()), 2.0**-9)


@pytest.mark.parametrize(("dtype", "worst"), [(torch.int8, 0.01), (FLOAT8, 0.04)])
def test_rows_of_8_bits_stay_near(dtype: torch.dtype, worst: float) -> None:
    x, weight = torch.randn(7, 128), torch.randn(48, 128)
    form = RowFormat(dtype)
    rows, columns = quantize_rows(x, form), quantize_rows(weight, form)

    out = scaled_linear(rows, columns.values, columns.scales, dtype=torch.float32)

    want = x @ weight.T
    assert (out - want).norm() / want.norm() < worst


def test_a_row_of_zeros_stays_zero_and_a_fixed_scale_cuts_off() -> None:
    rows = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, -900.0]]), RowFormat(FLOAT8))
    fixed = quantize_rows(torch.tensor([[1.0, -900.0]]), RowFormat(FLOAT8, fixed_scale=1.0))

    assert bool((rows.values[0].float() * rows.scales[0] == 0).all())
    assert fixed.values.float().tolist() == [[1.0, -448.0]]


def test_norms_and_gates_write_the_rows_that_follow() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    form = RowFormat(torch.int8)
    total = x + residual

    rows = rms_norm_rows(x, residual, weight, 1e-6, form)

    assert torch.equal(residual, total)
    normed = torch.nn.functional.rms_norm(total, (64,), weight, 1e-6)
    torch.testing.assert_close(rows.values * rows.scales[:, None], normed, rtol=0, atol=0.02)
    gated = silu_mul_rows(x, form)
    want = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    torch.testing.assert_close(gated.values * gated.scales[:, None], want, rtol=0, atol=0.02)


def test_geglu_is_torchs() -> None:
    x = torch.randn(4, 40)

    want = torch.nn.functional.gelu(x[:, :20], approximate="tanh") * x[:, 20:]

    torch.testing.assert_close(gelu_mul(x), want)


def test_outliers_are_added() -> None:
    dense = torch.where(torch.rand(20, 30) < 0.1, torch.randn(20, 30), 0.0)
    rows, columns = dense.nonzero(as_tuple=True)
    order = torch.randperm(rows.shape[0])
    x, out = torch.randn(4, 30), torch.randn(4, 20)
    want = out + x @ dense.T

    add_sparse(x, sparse_rows(rows[order], columns[order], dense[rows, columns][order], 20), out)

    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("has_normed_weights", [True, False])
def test_experts_are_the_sum_over_the_chosen(has_normed_weights: bool) -> None:
    logits, x = torch.randn(6, 5), torch.randn(6, 16)
    up, down = torch.randn(5, 12, 16), torch.randn(5, 16, 12)

    routing = route(logits, 2, has_normed_weights)
    spread = expert_linear(expert_linear(x, up, routing, False), down, routing, True)

    for token in range(6):
        weights, chosen = logits[token].softmax(-1).topk(2)
        if has_normed_weights:
            weights = weights / weights.sum()
        want = sum(w * down[e] @ (up[e] @ x[token]) for w, e in zip(weights, chosen, strict=True))
        torch.testing.assert_close(spread.view(6, 2, 16)[token].sum(0), want, rtol=1e-4, atol=1e-4)
