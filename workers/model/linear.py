"""A linear layer's weight in the layout that its device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor

_PACK_ROWS = 8
"""Batch for which oneDNN chooses its blocked layout. Measured on a Zen 4 with SmolLM2's shapes: layouts for 4, 8, 32
and 256 rows are equally fast at all batch sizes, that for 1 row is up to twice as slow."""


class Linear:
    """``y = x W^T + b`` for one rank's part of W."""

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
        """[out], or None."""
        return self._bias

    def pack(self) -> None:
        """Exchange the weight for oneDNN's blocked copy where there is oneDNN; results differ by rounding only.

        Plain float32 products of 2 to 16 rows cost up to four times as much as packed ones on CPUs.
        """
        if self._is_packed or self._weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACK_ROWS)
        self._is_packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, out] for ``x`` [num_tokens, in]."""
        if self._is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)
