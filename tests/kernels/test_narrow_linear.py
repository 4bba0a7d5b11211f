"""Products of 8- and 4-bit weights on a CPU: as their reference says, and for each row as if it were alone."""

from __future__ import annotations

import pytest
import torch

from kernels.codes import quantize_to_codes, quantize_to_spans
from kernels.narrow_linear import (
    NarrowWeight,
    narrow_linear,
    narrow_linear_ref,
    pack_4bit,
    pack_8bit,
    unpack_narrow,
)
from kernels.scaled_rows import quantize_rows_ref


def make(kind: str, num_out: int, width: int) -> tuple[NarrowWeight, torch.Tensor]:
    """A weight, and what it stands for."""
    from kernels.codes import dequantize_ref

    weight = torch.randn(num_out, width)
    if kind == "8 bits":
        values, scales = quantize_rows_ref(weight, torch.int8)
        return pack_8bit(values, scales), values.float() * scales[:, None]
    codes = (
        quantize_to_spans(weight, 4, 32)
        if kind == "4 bits with offsets"
        else quantize_to_codes(weight, 4, 64)
    )
    return pack_4bit(codes), dequantize_ref(codes)


KINDS = ("8 bits", "4 bits with offsets", "4 bits with zero points")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "width"), [(96, 192), (50, 128), (1, 64)])
def test_each_row_is_multiplied_as_if_it_were_alone(kind: str, num_out: int, width: int) -> None:
    torch.manual_seed(0)
    packed, stands_for = make(kind, num_out, width)
    assert (unpack_narrow(packed) - stands_for).abs().max() < 2e-3 * stands_for.abs().max()
    bias = torch.randn(num_out)

    for num_rows in (1, 2, 5, 6, 7, 13):
        x = torch.randn(num_rows, width)
        x[0, :64] = 0.0
        got = narrow_linear(x, packed, bias)

        want = narrow_linear_ref(x, packed, bias)
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
        alone = torch.cat([narrow_linear(row[None], packed, bias) for row in x])
        assert torch.equal(alone, got)


def test_no_rows_give_no_rows() -> None:
    packed, _ = make("8 bits", 32, 64)

    assert narrow_linear(torch.empty(0, 64), packed).shape == (0, 32)


def test_rows_of_another_width_are_refused() -> None:
    packed, _ = make("8 bits", 32, 64)

    with pytest.raises(ValueError, match="64 columns"):
        narrow_linear(torch.zeros(2, 128), packed)
