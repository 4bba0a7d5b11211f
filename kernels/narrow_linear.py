"""Products with weights of 8 or 4 bits on a CPU, by integer instructions: activations are rounded to 8 bits by groups.

What a row gives depends on nothing but that row, so that neighbours in a batch change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.native import native_kernels

GROUP_8BIT = 64
"""Columns of activations that share a scale beside 8-bit weights."""
GROUP_4BIT = 32
"""The same beside 4-bit weights: their own groups. As llama.cpp has it (ggml's Q4_1 times Q8_1)."""
_OUTS = 16
"""Outputs of a panel, as ``narrow.c`` reads them."""


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A matrix [out, in] in panels of 16 rows: bytes of four columns a row, rows side by side."""

    data: Tensor
    """[panels, steps, 16, 4] uint8: 8-bit numbers plus 128, or two codes of a group, half a group apart."""
    row_scales: Tensor | None
    """[panels * 16] float32, of 8-bit numbers."""
    scales: Tensor | None
    """[panels, groups, 16] float16, of codes."""
    offsets: Tensor | None
    """As ``scales``: a weight is ``scale * code + offset``."""
    num_out: int
    width: int

    @property
    def group(self) -> int:
        """Columns of activations that share a scale."""
        return GROUP_8BIT if self.scales is None else GROUP_4BIT


def pack_8bit(values: Tensor, scales: Tensor) -> NarrowWeight:
    """Lay out ``values`` [out, in] int8 with ``scales`` [out]; columns are a multiple of 64."""
    num_out, width = values.shape
    lifted = (_padded(values).to(torch.int16) + 128).to(torch.uint8)
    row_scales = torch.nn.functional.pad(scales.float(), (0, len(lifted) - num_out))
    return NarrowWeight(_panels(lifted), row_scales.contiguous(), None, None, num_out, width)


def pack_4bit(codes: Codes) -> NarrowWeight:
    """Lay out codes of up to 4 bits whose groups are multiples of 32 columns, without a table.

    Zero points become offsets, rounded to float16 as scales are.
    """
    assert codes.scales is not None, "codes of a table are not narrow"
    codes = codes.regroup(GROUP_4BIT)
    num_out, width = codes.shape
    scales = codes.scales.float()  # type: ignore[union-attr]
    if codes.offsets is not None:
        offsets = codes.offsets.float()
    else:
        offsets = -scales * (codes.middle if codes.zeros is None else codes.zeros.float())
    values = _padded(codes.values).view(-1, width // GROUP_4BIT, 2, GROUP_4BIT // 2)
    both = (values[:, :, 0] | values[:, :, 1] << 4).reshape(-1, width // 2)

    def beside(numbers: Tensor) -> Tensor:
        return _padded(numbers).view(-1, _OUTS, numbers.shape[1]).transpose(1, 2).contiguous().half()

    return NarrowWeight(_panels(both), None, beside(scales), beside(offsets), num_out, width)


def can_be_narrow(codes: Codes) -> bool:
    """True for codes that ``pack_4bit`` takes."""
    return (
        codes.bits <= 4 and codes.table is None and codes.scales is not None and codes.group % GROUP_4BIT == 0
    )


def unpack_narrow(weight: NarrowWeight) -> Tensor:
    """Say what the weight stands for: [out, in] float32."""
    rows = weight.data.permute(0, 2, 1, 3).reshape(-1, weight.data.shape[1] * 4)
    if weight.row_scales is not None:
        return ((rows.float() - 128) * weight.row_scales[:, None])[: weight.num_out]
    assert weight.scales is not None and weight.offsets is not None, "codes have both"  # noqa: PT018
    halves = rows.view(len(rows), -1, 1, GROUP_4BIT // 2)
    codes = torch.cat((halves & 15, halves >> 4), dim=2).view(len(rows), -1, GROUP_4BIT).float()
    scales, offsets = (
        part.float().transpose(1, 2).reshape(len(rows), -1, 1) for part in (weight.scales, weight.offsets)
    )
    return (codes * scales + offsets).view(len(rows), -1)[: weight.num_out]


def round_groups_ref(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round rows to int8 by groups: values [rows, in], scales [rows, groups]."""
    groups = x.float().view(x.shape[0], -1, group)
    scales = groups.abs().amax(-1) / 127
    values = (groups / scales.clamp(min=1e-30)[..., None]).round()
    return values.view(x.shape).to(torch.int8), scales


def narrow_linear_ref(x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    """Say in plain torch what ``narrow_linear`` must return."""
    values, scales = round_groups_ref(x, weight.group)
    rounded = values.float() * scales.repeat_interleave(weight.group, 1)
    out = rounded @ unpack_narrow(weight).T
    return out if bias is None else out + bias.float()


def narrow_linear(x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``, float32, for ``x`` [num_rows, in] float32.

    Raises:
        ValueError: ``x`` does not fit.
    """
    if x.dim() != 2 or x.shape[1] != weight.width or x.dtype != torch.float32:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a weight of {weight.width} columns")
    native = native_kernels()
    if native is None:
        return narrow_linear_ref(x, weight, bias)
    return native.narrow_linear(
        x.contiguous(),
        weight.data,
        weight.row_scales,
        weight.scales,
        weight.offsets,
        bias,
        weight.group,
        weight.num_out,
    )


def _padded(rows: Tensor) -> Tensor:
    """Whole panels of rows."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _OUTS))


def _panels(rows: Tensor) -> Tensor:
    """[rows, bytes] as [panels, steps, 16, 4]."""
    return rows.view(-1, _OUTS, rows.shape[1] // 4, 4).transpose(1, 2).contiguous()
