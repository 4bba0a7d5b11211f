"""Linear layers over quantized weights: codes, 8-bit numbers, and several kinds beside each other."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from kernels.coded_linear import coded_linear, unpack
from kernels.codes import can_pack, pack_codes
from kernels.narrow_linear import (
    GROUP_8BIT,
    NarrowWeight,
    can_be_narrow,
    narrow_linear,
    pack_4bit,
    pack_8bit,
)
from kernels.nibble_linear import MAX_TOKENS, can_multiply, has_float8, nibble_linear
from kernels.outliers import SparseRows, add_sparse, sparse_rows
from kernels.scaled_linear import scaled_linear
from kernels.scaled_rows import FLOAT8, RowFormat, ScaledRows, quantize_rows, quantize_rows_ref
from workers.model.linear import Activations, Linear, LinearLayer
from workers.model.quantized.stored_weight import CodedWeight, DenseWeight, ScaledWeight, StoredWeight, join

COPY_TOKENS = 65
"""From so many tokens on cuBLAS's product of 16-bit numbers is faster than one with codes, on an H200."""


def make_linear(
    parts: list[StoredWeight], bias: Tensor | None, device: torch.device, dtype: torch.dtype
) -> LinearLayer:
    """Lay ``parts`` on top of each other and return the layer that multiplies with them.

    Args:
        parts: weights with equal inputs, cut to this rank's share.
        bias: of all outputs, or None.
        device: where the layer computes.
        dtype: of activations.
    """
    joined = join(parts)
    if len(joined) > 1 and device.type == "cpu":
        joined = [DenseWeight(torch.cat([part.dequantize() for part in joined]))]
    starts = [0]
    for part in joined:
        starts.append(starts[-1] + part.shape[0])
    linears = [
        _make_one(part, None if bias is None else bias[starts[i] : starts[i + 1]].contiguous(), device, dtype)
        for i, part in enumerate(joined)
    ]
    return linears[0] if len(linears) == 1 else StackedLinear(linears, bias)


def _make_one(
    weight: StoredWeight, bias: Tensor | None, device: torch.device, dtype: torch.dtype
) -> LinearLayer:
    if isinstance(weight, CodedWeight) and can_pack(weight.codes):
        return CodedLinear(weight, bias, device, dtype)
    if isinstance(weight, ScaledWeight):
        return ScaledLinear(weight, bias, device, dtype)
    values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
    return Linear(values.to(device, dtype).contiguous(), bias)


def narrow_head(head: LinearLayer) -> LinearLayer:
    """The projection to logits with rows of 8 bits: on a CPU it is read at every step, and is large."""
    if not isinstance(head, Linear) or head.in_features % GROUP_8BIT:
        return head
    values, scales = quantize_rows_ref(head.weight, torch.int8)
    return ScaledLinear(ScaledWeight(values, scales), head.bias, head.weight.device, head.weight.dtype)


class _Unfused:
    """No products with a norm or an addition folded in."""

    fuses_one_row = False

    @property
    def copy_bytes(self) -> int:
        """See ``LinearLayer``."""
        return 0

    def keep_copy(self) -> None:
        """See ``LinearLayer``."""

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return None

    def normed(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None = None) -> NoReturn:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")

    def add_to(self, residual: Tensor, x: Tensor) -> NoReturn:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")

    def normed_gate_up(self, x: Tensor, norm: Tensor | None, eps: float) -> NoReturn:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")


class CodedLinear(_Unfused):
    """Weights of small integers with a scale for each group, unpacked on the way to use."""

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Lay out ``weight`` for ``device``."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._stored: CodedWeight | None = weight if device.type == "cpu" else None
        self._dtype = dtype
        self._packed = pack_codes(weight.codes, dtype)
        self._order = weight.order
        self._copy: Tensor | None = None
        self._most_coded = MAX_TOKENS
        """Tokens that a product with codes takes, rather than one with the copy or with a weight just unpacked."""
        self._form: RowFormat | None = None
        if has_float8(device) and can_multiply(self._packed) and weight.outliers is None:
            self._form = RowFormat(FLOAT8, sum_group=self._packed.group)
        self._dense: Linear | None = None
        self._narrow: NarrowWeight | None = None
        self._sparse: SparseRows | None = None
        if weight.outliers is not None:
            outliers = weight.outliers
            self._sparse = sparse_rows(outliers.rows, outliers.columns, outliers.values, self.out_features)

    def pack(self, is_narrow: bool = False) -> None:
        """On a CPU: unpack once, since products of plain numbers are as exact as the codes; or stay narrow."""
        if self._stored is None:
            return
        codes = self._stored.codes
        is_plain = self._order is None and self._sparse is None and self._dtype == torch.float32
        if is_narrow and is_plain and can_be_narrow(codes):
            self._narrow = pack_4bit(codes)
        else:
            self._dense = Linear(self._stored.dequantize().to(self._dtype), self.bias)
            self._dense.pack()
        self._stored = None

    @property
    def copy_bytes(self) -> int:
        """See ``LinearLayer``."""
        return self.out_features * self.in_features * self._dtype.itemsize

    def keep_copy(self) -> None:
        """See ``LinearLayer``; columns stay in the codes' order."""
        self._copy = unpack(self._packed, self._dtype)
        self._most_coded = COPY_TOKENS - 1

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """Two FP8 numbers, where few tokens meet FP8 tensor cores; columns in another order are sorted first."""
        return self._form if self._order is None and num_tokens <= self._most_coded else None

    def __call__(self, x: Activations) -> Tensor:
        """See ``LinearLayer``."""
        if isinstance(x, ScaledRows):
            return nibble_linear(x, self._packed, self.bias, self._dtype)
        if self._dense is not None:
            return self._dense(x)
        if self._narrow is not None:
            return narrow_linear(x, self._narrow, self.bias)
        ordered = (x if self._order is None else x.index_select(1, self._order)).contiguous()
        if self._copy is not None and x.shape[0] > self._most_coded:
            out = torch.nn.functional.linear(ordered, self._copy, self.bias)
        elif self._form is not None and x.shape[0] <= self._most_coded:
            return nibble_linear(quantize_rows(ordered, self._form), self._packed, self.bias, self._dtype)
        else:
            out = coded_linear(ordered, self._packed, self.bias)
        if self._sparse is not None:
            add_sparse(x.contiguous(), self._sparse, out)
        return out


class ScaledLinear(_Unfused):
    """8-bit weights times activations rounded to the same type."""

    def __init__(
        self, weight: ScaledWeight, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Keep ``weight`` on ``device``."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._form = RowFormat(weight.values.dtype, weight.input_scale)
        self._dtype = dtype
        self._values = weight.values.to(device).contiguous()
        self._scales = weight.scales.to(device, torch.float32).contiguous()
        self._dense: Linear | None = None
        self._narrow: NarrowWeight | None = None

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return self._form if self._narrow is None else None

    def pack(self, is_narrow: bool = False) -> None:
        """On a CPU: widen the weight once, activations being rounded as ever; or stay narrow, if of integers."""
        if self._values.device.type != "cpu" or self._dense is not None or self._narrow is not None:
            return
        is_whole = self._values.dtype == torch.int8 and self.in_features % GROUP_8BIT == 0
        if is_narrow and is_whole and self._dtype == torch.float32:
            self._narrow = pack_8bit(self._values, self._scales)
        else:
            weight = self._values.float() * self._scales[:, None]
            self._dense = Linear(weight.to(self._dtype), self.bias)
            self._dense.pack()

    def __call__(self, x: Activations) -> Tensor:
        """See ``LinearLayer``."""
        if self._narrow is not None:
            assert isinstance(x, Tensor), "row_format is None"
            return narrow_linear(x, self._narrow, self.bias)
        if isinstance(x, Tensor):
            x = quantize_rows(x.contiguous(), self._form)
        if self._dense is not None:
            return self._dense((x.values.float() * x.scales[:, None]).to(self._dtype))
        return scaled_linear(x, self._values, self._scales, self.bias, self._dtype)


class StackedLinear(_Unfused):
    """Outputs of layers of different kinds side by side (GGUF keeps q and k in 4 bits beside v in 6)."""

    def __init__(self, linears: list[LinearLayer], bias: Tensor | None) -> None:
        """Take the layers; ``bias`` is what they hold in parts."""
        self.out_features = sum(linear.out_features for linear in linears)
        self.in_features = linears[0].in_features
        self.bias = bias
        self._linears = linears

    @property
    def copy_bytes(self) -> int:
        """See ``LinearLayer``."""
        return sum(linear.copy_bytes for linear in self._linears)

    def keep_copy(self) -> None:
        """See ``LinearLayer``."""
        for linear in self._linears:
            linear.keep_copy()

    def pack(self, is_narrow: bool = False) -> None:
        """See ``LinearLayer``."""
        for linear in self._linears:
            linear.pack(is_narrow)

    def __call__(self, x: Activations) -> Tensor:
        """See ``LinearLayer``."""
        assert not isinstance(x, ScaledRows), "layers of several kinds round activations themselves"
        return torch.cat([linear(x) for linear in self._linears], dim=1)
