"""A rank's linear layers: what all kinds of them do, and the plain one in its device's fastest layout."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.gemv import linear_add, norm_gate_up, norm_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.scaled_rows import RowFormat, ScaledRows, rms_norm_rows, silu_mul_rows
from kernels.silu_mul import silu_mul

_PACK_ROWS = 8
"""Batch for which oneDNN chooses its blocked layout. Measured on a Zen 4 with SmolLM2's shapes: layouts for 4, 8, 32
and 256 rows are equally fast at all batch sizes, that for 1 row is up to twice as slow."""

Activations = Tensor | ScaledRows


class LinearLayer(Protocol):
    """``y = x W^T + b`` for one rank's part of W, however W is kept."""

    out_features: int
    in_features: int

    @property
    def bias(self) -> Tensor | None:
        """[out], or None."""
        ...

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """How activations of so many tokens are rounded before the product; None: they stay as they are."""
        ...

    @property
    def fuses_one_row(self) -> bool:
        """True where ``normed``, ``add_to`` and ``normed_gate_up`` exist: on CUDA, for products of one row."""
        ...

    def __call__(self, x: Activations) -> Tensor:
        """Return [num_tokens, out] for ``x`` [num_tokens, in]."""
        ...

    def pack(self, is_narrow: bool = False) -> None:
        """Take the layout that a CPU multiplies fastest; results differ by rounding only.

        ``is_narrow``: weights of 8 or 4 bits stay so, and activations are rounded to 8 bits by groups of columns.
        """
        ...

    @property
    def copy_bytes(self) -> int:
        """Memory of a copy in full that would multiply many tokens faster; 0 where there is none to gain."""
        ...

    def keep_copy(self) -> None:
        """Keep that copy."""
        ...

    def normed(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """See ``kernels.gemv.norm_linear``."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See ``kernels.gemv.linear_add``."""
        ...

    def normed_gate_up(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """See ``kernels.gemv.norm_gate_up``."""
        ...


class Linear:
    """Plain numbers."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take ``weight`` [out, in] and ``bias`` [out]."""
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias
        self._is_packed = False

    @property
    def weight(self) -> Tensor:
        """[out, in], as long as it is not packed."""
        assert not self._is_packed, "a packed weight has a layout of its own"
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """See ``LinearLayer``."""
        return self._bias

    @property
    def fuses_one_row(self) -> bool:
        """See ``LinearLayer``."""
        return self._weight.device.type == "cuda"

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return None

    @property
    def copy_bytes(self) -> int:
        """See ``LinearLayer``."""
        return 0

    def keep_copy(self) -> None:
        """See ``LinearLayer``."""

    def pack(self, is_narrow: bool = False) -> None:
        """Exchange the weight for oneDNN's blocked copy where there is oneDNN; results differ by rounding only.

        Plain float32 products of 2 to 16 rows cost up to four times as much as packed ones on CPUs.
        """
        if self._is_packed or self._weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACK_ROWS)
        self._is_packed = True

    def __call__(self, x: Activations) -> Tensor:
        """See ``LinearLayer``."""
        assert isinstance(x, Tensor), "plain weights take plain activations"
        if self._is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def normed(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """See ``LinearLayer``."""
        return norm_linear(x, norm, self._weight, self._bias, eps, out)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See ``LinearLayer``."""
        linear_add(x, self._weight, residual)

    def normed_gate_up(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """See ``LinearLayer``."""
        return norm_gate_up(x, norm, self._weight, eps)


class _Target(Protocol):
    """What activations are made for."""

    def row_format(self, num_tokens: int) -> RowFormat | None: ...


def normed_for(linear: _Target, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> Activations:
    """Normalise ``x``, added to ``residual`` in place where there is one, into what ``linear`` multiplies."""
    form = linear.row_format(x.shape[0])
    if form is not None:
        return rms_norm_rows(x, residual, norm, eps, form)
    return rms_norm(x, norm, eps) if residual is None else add_rms_norm(x, residual, norm, eps)


def gated_for(linear: LinearLayer, gate_up: Tensor) -> Activations:
    """SwiGLU into what ``linear`` multiplies."""
    form = linear.row_format(gate_up.shape[0])
    return silu_mul(gate_up) if form is None else silu_mul_rows(gate_up, form)
