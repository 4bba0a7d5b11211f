"""Rounds weights so that what they compute changes least: GPTQ by error feedback, AWQ by the best scale of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from deploy.quantize.calibration import InputStatistics
from deploy.quantize.grids import CodeGrid, Float8Grid, Grid

_Grid = TypeVar("_Grid", CodeGrid, Float8Grid)

_DAMPING = 0.01
"""Share of the mean diagonal added to the Hessian, as in the paper's code."""
_BLOCK = 128
_SHRINKAGES = (0.0, 0.1, 0.3, 0.6)
"""Shares of products off the diagonal that are taken away; at 2,048 tokens SmolLM2-135M's MLPs do best with 0.6."""
_DRIFT_SHARES = (0.5, 1.0)
"""How much of the layers' drift a weight may make good; all of it, fitted to few tokens, is too much for most."""
_EXPONENTS = tuple(step / 20 for step in range(20))
"""Tried for AWQ's scales, as in the paper."""


def round_with_feedback(
    weight: Tensor, grid_of: Callable[[Tensor], _Grid], seen: InputStatistics
) -> tuple[Tensor, _Grid]:
    """Round ``weight`` [out, in] column by column, each one's error being made good by those that follow.

    Columns whose inputs are largest come first. Products of few tokens are mostly noise off the diagonal, and what
    makes good an error on those tokens adds one on every other text. So the rest is shrunk by the share that serves
    tokens which were not fitted to; where none does, the weight is rounded to nearest. Then what the layers before
    have got wrong already is made good as well, as far as that serves those tokens.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, with the order of columns of its code ("act-order") and
    steps fixed beforehand; shrinking to the diagonal: Schaefer and Strimmer 2005, doi:10.2202/1544-6115.1175, here by
    trial; outputs of the full model as the aim: Li et al. 2025, arXiv:2504.02692, here by least squares.

    Args:
        weight: rows of all layers that share the input.
        grid_of: what rounded numbers a weight may have.
        seen: their inputs.

    Returns:
        The rounded weight and its grid.
    """
    grid = grid_of(weight)
    best, best_grid, best_share = grid.rounded(weight), grid, _SHRINKAGES[-1]
    least = drifting_error(best, weight, seen)
    for share in _SHRINKAGES:
        rounded = _round_by_columns(weight, grid, _shrunk(seen.gram, share))
        error = drifting_error(rounded, weight, seen)
        if error < least:
            best, best_share, least = rounded, share, error
    for aim in _aims(weight, seen):
        grid = grid_of(aim)
        rounded = _round_by_columns(aim, grid, _shrunk(seen.gram, best_share))
        error = drifting_error(rounded, weight, seen)
        if error < least:
            best, best_grid, least = rounded, grid, error
    return best, best_grid


def drifting_error(rounded: Tensor, weight: Tensor, seen: InputStatistics) -> float:
    """Return by how much outputs differ from the full model's on the held-out tokens, squared and summed.

    Less what does not depend on ``rounded``: the drift of the inputs alone.
    """
    error = rounded - weight.float()
    own = ((error @ seen.held_out) * error).sum()
    return float(own - 2 * ((weight.float() @ seen.held_out_drift) * error).sum())


def _aims(weight: Tensor, seen: InputStatistics) -> Iterator[Tensor]:
    """The weights that would serve drifted inputs best, some of the way from ``weight``."""
    if not seen.drift.any():
        return
    hessian = seen.gram.double()
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    change = torch.linalg.solve(hessian, (weight.double() @ seen.drift.double()).t()).t().float()
    for share in _DRIFT_SHARES:
        yield weight.float() + share * change


def _shrunk(gram: Tensor, share: float) -> Tensor:
    return torch.lerp(gram, torch.diag(gram.diagonal()), share)


def output_error(rounded: Tensor, weight: Tensor, gram: Tensor) -> float:
    """Return the sum of squared errors of outputs over the inputs whose products ``gram`` sums."""
    error = rounded - weight.float()
    return float(((error @ gram) * error).sum())


def _round_by_columns(weight: Tensor, grid: Grid, gram: Tensor) -> Tensor:
    width = weight.shape[1]
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    # Columns lie as rows here: each step reads a few of them.
    rest = weight.float()[:, order].t().contiguous()
    hessian = gram.double()[order][:, order]
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    rest[dead] = 0.0
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    feedback = torch.linalg.cholesky(inverse, upper=True).float()
    rounded, columns = torch.empty_like(rest), order.tolist()
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = torch.zeros(end - start, rest.shape[1])
        for place in range(start, end):
            values = grid.round(rest[place], columns[place])
            rounded[place] = values
            error = (rest[place] - values) / feedback[place, place]
            rest[place:end] -= feedback[place, place:end, None] * error
            errors[place - start] = error
        rest[end:] -= feedback[start:end, end:].t() @ errors
    return rounded[torch.argsort(order)].t().contiguous()


def best_awq_scale(weight: Tensor, group: int, magnitudes: Tensor, gram: Tensor) -> Tensor:
    """Return what inputs are divided by, and columns multiplied, so that rounding the weight costs least.

    Source: Lin et al. 2023, arXiv:2306.00978, section 3.2; the loss is that of the outputs.

    Args:
        weight: [out, in], rows of all layers that share the input.
        group: columns that share a step.
        magnitudes: [in], mean absolute inputs.
        gram: [in, in], sums of products of calibration inputs.
    """
    best, least = torch.ones_like(magnitudes), float("inf")
    importance = gram.diagonal()
    for exponent in _EXPONENTS:
        scale = magnitudes.clamp(min=1e-5) ** exponent
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        scaled = weight * scale
        grid = CodeGrid(scaled, group, importance / scale.square(), least_zero=0)
        loss = output_error(grid.rounded(scaled) / scale, weight, gram)
        if loss < least:
            best, least = scale, loss
    return best
