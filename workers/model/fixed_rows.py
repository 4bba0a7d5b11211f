"""A linear layer whose result for a token does not depend on the others in the batch: products of one shape only.

Libraries choose another kernel, and with it another order of summation, by the number of rows. Here rows are computed
so many at a time, the last of them padded, so that the same code runs over every row. Source: He et al. 2025,
"Defeating nondeterminism in LLM inference" (Thinking Machines), which writes batch-invariant kernels instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.scaled_rows import RowFormat
from workers.engine.errors import UserError
from workers.model.linear import Activations, LinearLayer

CPU_ROWS = 16
"""oneDNN's blocked products of 16 rows cost about what 4 do; prompts are computed 16 tokens at a time."""
CUDA_ROWS = 256
"""The largest decode batch that is common; a smaller tile would make prompts slower, a larger one small batches."""


class FixedRows:
    """A ``LinearLayer`` over another one."""

    fuses_one_row = False

    def __init__(self, inner: LinearLayer, num_rows: int) -> None:
        """Multiply by ``inner``, ``num_rows`` rows at a time.

        Raises:
            UserError: its products depend on more than their rows.
        """
        if inner.row_format(num_rows) is not None:
            raise UserError(
                "--deterministic does not go with weights whose activations are rounded together: leave out "
                "--quantization, or --deterministic",
                "deterministic",
            )
        self._inner = inner
        self._num_rows = num_rows
        self.out_features = inner.out_features
        self.in_features = inner.in_features

    @property
    def bias(self) -> Tensor | None:
        """See ``LinearLayer``."""
        return self._inner.bias

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return None

    def __call__(self, x: Activations) -> Tensor:
        """See ``LinearLayer``."""
        assert isinstance(x, Tensor), "activations are not rounded"
        num_tokens, num_rows = x.shape[0], self._num_rows
        rest = -num_tokens % num_rows
        padded = torch.nn.functional.pad(x, (0, 0, 0, rest)) if rest else x.contiguous()
        parts = [self._inner(part) for part in padded.split(num_rows)]
        product = parts[0] if len(parts) == 1 else torch.cat(parts)
        return product[:num_tokens] if rest else product

    @property
    def copy_bytes(self) -> int:
        """See ``LinearLayer``: there is one way to multiply, for few tokens and many."""
        return 0

    def keep_copy(self) -> None:
        """See ``LinearLayer``."""

    def pack(self, is_narrow: bool = False) -> None:
        """See ``LinearLayer``."""
        self._inner.pack(is_narrow)

    def normed(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")

    def normed_gate_up(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """See ``LinearLayer``."""
        raise AssertionError("fuses_one_row is False")
