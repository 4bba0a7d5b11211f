"""A linear layer's weight as a checkpoint stores it, whatever the format: cut, joined and read back as numbers.

Readers of formats make these of whole tensors; only here is anything known of ranks' rows and columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.codes import Codes, dequantize_ref


class StoredWeight(Protocol):
    """A matrix [out, in] in some encoding."""

    @property
    def shape(self) -> tuple[int, int]:
        """Out and in."""
        ...

    def take(self, rows: range, columns: range) -> StoredWeight:
        """Return a part of it; in another encoding where this one cannot be cut there."""
        ...

    def reorder_rows(self, order: Tensor) -> StoredWeight:
        """Return it with row ``order[i]`` as row i."""
        ...

    def dequantize(self) -> Tensor:
        """Return [out, in] float32."""
        ...


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Plain numbers."""

    values: Tensor
    """[out, in], any floating dtype."""

    @property
    def shape(self) -> tuple[int, int]:
        """See ``StoredWeight``."""
        return (self.values.shape[0], self.values.shape[1])

    def take(self, rows: range, columns: range) -> DenseWeight:
        """See ``StoredWeight``."""
        return DenseWeight(self.values[rows.start : rows.stop, columns.start : columns.stop])

    def reorder_rows(self, order: Tensor) -> DenseWeight:
        """See ``StoredWeight``."""
        return DenseWeight(self.values[order])

    def dequantize(self) -> Tensor:
        """See ``StoredWeight``."""
        return self.values.float()


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """8-bit numbers, multiplied as they are with activations of the same type; scales come afterwards."""

    values: Tensor
    """[out, in] float8_e4m3fn or int8."""
    scales: Tensor
    """[out] float32."""
    input_scale: float | None = None
    """A fixed scale of the activations; None: each row of them has its own, from its largest value."""

    @property
    def shape(self) -> tuple[int, int]:
        """See ``StoredWeight``."""
        return (self.values.shape[0], self.values.shape[1])

    def take(self, rows: range, columns: range) -> ScaledWeight:
        """See ``StoredWeight``."""
        values = self.values[rows.start : rows.stop, columns.start : columns.stop]
        return replace(self, values=values, scales=self.scales[rows.start : rows.stop])

    def reorder_rows(self, order: Tensor) -> ScaledWeight:
        """See ``StoredWeight``."""
        values = self.values.view(torch.uint8)[order].view(self.values.dtype)
        return replace(self, values=values, scales=self.scales[order])

    def dequantize(self) -> Tensor:
        """See ``StoredWeight``."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Outliers:
    """What is added to single weights: SqueezeLLM's sparse part."""

    rows: Tensor
    """[count] int64."""
    columns: Tensor
    """[count] int64."""
    values: Tensor
    """[count] float32."""

    def take(self, rows: range, columns: range) -> Outliers:
        """Those of a part, numbered within it."""
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        inside &= (self.columns >= columns.start) & (self.columns < columns.stop)
        return Outliers(
            self.rows[inside] - rows.start, self.columns[inside] - columns.start, self.values[inside]
        )


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Integer codes with a scale for each group of a row (``kernels.coded_linear.Codes``), and what formats add."""

    codes: Codes
    order: Tensor | None = None
    """[in] int64: which column of the matrix each column of the codes is (GPTQ's desc_act); None: its own."""
    outliers: Outliers | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See ``StoredWeight``."""
        return self.codes.shape

    def take(self, rows: range, columns: range) -> StoredWeight:
        """See ``StoredWeight``; columns in another order can be cut only as plain numbers."""
        is_whole = columns == range(self.shape[1])
        if self.order is not None and not is_whole:
            return DenseWeight(self.dequantize()).take(rows, columns)
        codes, outliers = self.codes.take_rows(rows), self.outliers
        if not is_whole:
            codes = codes.take_columns(columns)
        if outliers is not None:
            outliers = outliers.take(rows, columns)
        return CodedWeight(codes, self.order, outliers)

    def reorder_rows(self, order: Tensor) -> CodedWeight:
        """See ``StoredWeight``."""
        assert self.outliers is None, "no format with outliers needs its rows in another order"
        return replace(self, codes=self.codes.reorder_rows(order))

    def dequantize(self) -> Tensor:
        """See ``StoredWeight``."""
        values = dequantize_ref(self.codes)
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        if self.outliers is not None:
            index = (self.outliers.rows, self.outliers.columns)
            values.index_put_(index, self.outliers.values.to(values.dtype), accumulate=True)
        return values


def join(parts: list[StoredWeight]) -> list[StoredWeight]:
    """Lay weights with equal inputs on top of each other; neighbours that cannot be one weight stay apart."""
    joined = [parts[0]]
    for part in parts[1:]:
        whole = _join_two(joined[-1], part)
        if whole is None:
            joined.append(part)
        else:
            joined[-1] = whole
    return joined


def _join_two(first: StoredWeight, second: StoredWeight) -> StoredWeight | None:
    if isinstance(first, DenseWeight) and isinstance(second, DenseWeight):
        return DenseWeight(torch.cat((first.values, second.values.to(first.values.dtype))))
    if isinstance(first, ScaledWeight) and isinstance(second, ScaledWeight):
        if first.values.dtype != second.values.dtype:
            return None
        raw = torch.cat((first.values.view(torch.uint8), second.values.view(torch.uint8)))
        # Parts of one projection see the same activations; of two fixed scales the larger cuts nothing off.
        fixed = (
            None
            if first.input_scale is None or second.input_scale is None
            else max(first.input_scale, second.input_scale)
        )
        return ScaledWeight(raw.view(first.values.dtype), torch.cat((first.scales, second.scales)), fixed)
    if not (isinstance(first, CodedWeight) and isinstance(second, CodedWeight)):
        return None
    if (first.order is None) != (second.order is None):
        return None
    if first.order is not None and second.order is not None and not torch.equal(first.order, second.order):
        return None
    group = math.gcd(first.codes.group, second.codes.group)
    codes = first.codes.regroup(group).stack(second.codes.regroup(group))
    if codes is None:
        return None
    outliers = first.outliers
    if second.outliers is not None:
        rows = second.outliers.rows + first.shape[0]
        more = replace(second.outliers, rows=rows)
        outliers = (
            more
            if outliers is None
            else Outliers(
                torch.cat((outliers.rows, more.rows)),
                torch.cat((outliers.columns, more.columns)),
                torch.cat((outliers.values, more.values)),
            )
        )
    return CodedWeight(codes, first.order, outliers)
