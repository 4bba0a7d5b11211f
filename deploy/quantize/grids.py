"""What numbers a rounded weight may be: 4-bit steps between a group's ends, or FP8 numbers times a row's scale."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.scaled_rows import FLOAT8, quantize_rows_ref

GROUP = 128
"""Columns that share a scale, at most: what kernels and other engines expect."""
BITS = 4
_TOP = (1 << BITS) - 1
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that its steps may span; the ends are cut off."""


class Grid(Protocol):
    """Rounds single columns of one weight."""

    def round(self, values: Tensor, column: int) -> Tensor:
        """The nearest numbers that ``column`` may hold to ``values`` [out]."""
        ...


class CodeGrid:
    """4-bit codes with a scale and a zero point for each group of a row."""

    def __init__(
        self, weight: Tensor, group: int, importance: Tensor | None = None, least_zero: int = 1
    ) -> None:
        """Choose each group's steps for ``weight`` [out, in].

        Ends are cut off where that makes the error of the others so much smaller that the whole is less; columns
        count by their ``importance`` [in]. Source: the clipping of AWQ (Lin et al. 2023, arXiv:2306.00978).

        Args:
            weight: to be rounded.
            group: columns that share a scale.
            importance: None: all columns count alike.
            least_zero: 1 where formats keep zero points less one.
        """
        self.group = group
        groups = weight.float().view(weight.shape[0], -1, group)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        shares = 1.0 if importance is None else importance.view(1, -1, group)
        self.scales = self.zeros = torch.empty(0)
        least = torch.full_like(low, float("inf"))
        for clip in _CLIPS:
            scales, zeros = _steps(low * clip, high * clip, least_zero)
            rounded = _rounded(groups, scales[..., None], zeros[..., None])
            errors = ((rounded - groups).square() * shares).sum(-1)
            if clip == 1.0:
                self.scales, self.zeros, least = scales, zeros, errors
                continue
            is_better = errors < least
            self.scales = torch.where(is_better, scales, self.scales)
            self.zeros = torch.where(is_better, zeros, self.zeros)
            least = torch.where(is_better, errors, least)

    def round(self, values: Tensor, column: int) -> Tensor:
        """See ``Grid``."""
        index = column // self.group
        return _rounded(values, self.scales[:, index], self.zeros[:, index])

    def rounded(self, weight: Tensor) -> Tensor:
        """All of ``weight`` rounded to nearest."""
        groups = weight.float().view(weight.shape[0], -1, self.group)
        return _rounded(groups, self.scales[..., None], self.zeros[..., None]).view(weight.shape)

    def codes(self, weight: Tensor) -> Codes:
        """The codes of ``weight``, rounded to nearest: exactly itself if it is on the grid."""
        groups = weight.float().view(weight.shape[0], -1, self.group)
        values = (groups / self.scales[..., None] + self.zeros[..., None]).round().clamp(0, _TOP)
        zeros = self.zeros.to(torch.int16)
        return Codes(values.to(torch.uint8).view(weight.shape), BITS, self.group, self.scales, zeros)


class Float8Grid:
    """e4m3 numbers with a scale for each row."""

    def __init__(self, weight: Tensor) -> None:
        """Take the scales that rounding ``weight`` [out, in] to nearest takes."""
        self.scales = quantize_rows_ref(weight.float(), FLOAT8)[1]

    def round(self, values: Tensor, column: int) -> Tensor:
        """See ``Grid``."""
        top = torch.finfo(FLOAT8).max
        return (values / self.scales).clamp(-top, top).to(FLOAT8).float() * self.scales

    def rounded(self, weight: Tensor) -> Tensor:
        """All of ``weight`` rounded to nearest."""
        return (weight.float() / self.scales[:, None]).to(FLOAT8).float() * self.scales[:, None]


def _steps(low: Tensor, high: Tensor, least_zero: int) -> tuple[Tensor, Tensor]:
    """Scale, as float16 keeps it, and zero point."""
    scales = ((high - low) / _TOP).clamp(min=1e-7)
    zeros = (-low / scales).round()
    # A zero point that may not be 0 takes one step from the numbers above it.
    scales = torch.where(zeros < least_zero, scales * _TOP / (_TOP - least_zero), scales)
    return scales.half().float(), zeros.clamp(least_zero, _TOP)


def _rounded(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return ((values / scales + zeros).round().clamp(0, _TOP) - zeros) * scales
