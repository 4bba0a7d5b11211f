"""Rounds one weight to 4-bit codes: GPTQ by columns with error feedback, AWQ by the best scale of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.codes import Codes, dequantize_ref, quantize_to_codes

GROUP = 128
BITS = 4
_DAMPING = 0.01
"""Share of the mean diagonal added to the Hessian, as in the paper's code."""
_BLOCK = 128
_SHRINKAGES = (0.0, 0.1, 0.3, 0.6)
"""Shares of products off the diagonal that are taken away; at 2,048 tokens SmolLM2-135M's MLPs do best with 0.6."""
_EXPONENTS = tuple(step / 20 for step in range(20))
"""Tried for AWQ's scales, as in the paper."""


def group_of(width: int) -> int:
    """The largest group up to 128 that divides ``width``: 64 for SmolLM's 576."""
    group = GROUP
    while width % group:
        group //= 2
    return group


def round_gptq(weight: Tensor, gram: Tensor, held_out: Tensor) -> Codes:
    """Round ``weight`` [out, in] column by column; each column's error is made good by those not yet rounded.

    Products of few tokens are mostly noise off the diagonal, and what makes good an error on those tokens adds one on
    every other text. So the rest is shrunk by the share that serves tokens which were not fitted to; where none does,
    the weight is rounded to nearest.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; shrinking to the diagonal: Schaefer and Strimmer 2005,
    doi:10.2202/1544-6115.1175, here by trial.

    Args:
        weight: [out, in].
        gram: [in, in], sums of products of the calibration inputs to fit to.
        held_out: the same of those to judge by.
    """
    best = _round_to_nearest(weight)
    least = output_error(best, weight, held_out)
    for share in _SHRINKAGES:
        codes = _round_by_columns(weight, torch.lerp(gram, torch.diag(gram.diagonal()), share))
        error = output_error(codes, weight, held_out)
        if error < least:
            best, least = codes, error
    return best


def output_error(codes: Codes, weight: Tensor, gram: Tensor) -> float:
    """Return the sum of squared errors of outputs over the inputs whose products ``gram`` sums."""
    error = dequantize_ref(codes) - weight.float()
    return float(((error @ gram) * error).sum())


def _round_to_nearest(weight: Tensor) -> Codes:
    num_out, width = weight.shape
    group = group_of(width)
    rows = weight.float().reshape(-1, group)
    scale, zero = _grid(rows)
    values = (rows / scale[:, None] + zero[:, None]).round().clamp(0, (1 << BITS) - 1)
    scales, zeros = scale.view(num_out, -1), zero.to(torch.int16).view(num_out, -1)
    return Codes(values.to(torch.uint8).view(num_out, width), BITS, group, scales, zeros)


def _round_by_columns(weight: Tensor, gram: Tensor) -> Codes:
    width = weight.shape[1]
    group = group_of(width)
    rest, hessian = weight.float().clone(), gram.double().clone()
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    rest[:, dead] = 0.0
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    feedback = torch.linalg.cholesky(inverse, upper=True).float()
    values, scales, zeros = torch.zeros_like(rest, dtype=torch.uint8), [], []
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = torch.zeros(rest.shape[0], end - start)
        for column in range(start, end):
            if column % group == 0:
                scale, zero = _grid(rest[:, column : column + group])
                scales.append(scale)
                zeros.append(zero)
            code = (rest[:, column] / scale + zero).round().clamp(0, (1 << BITS) - 1)
            values[:, column] = code.to(torch.uint8)
            error = (rest[:, column] - (code - zero) * scale) / feedback[column, column]
            rest[:, column:end] -= error[:, None] * feedback[column, column:end]
            errors[:, column - start] = error
        rest[:, end:] -= errors @ feedback[start:end, end:]
    return Codes(values, BITS, group, torch.stack(scales, 1), torch.stack(zeros, 1).to(torch.int16))


def _grid(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row, as the format keeps them: it stores zero points less one, and 0 reads as 16."""
    codes = quantize_to_codes(columns, BITS, columns.shape[1])
    assert codes.scales is not None, "codes without a table have scales"
    assert codes.zeros is not None, "rounding to nearest gives zero points"
    scale, zero = codes.scales[:, 0], codes.zeros[:, 0].float()
    top = (1 << BITS) - 1
    scale = torch.where(zero == 0, scale * top / (top - 1), scale)
    return scale.half().float(), zero.clamp(min=1)


def best_awq_scale(weights: list[Tensor], magnitudes: Tensor, gram: Tensor) -> Tensor:
    """Return what inputs are divided by, and columns multiplied, so that rounding the weights costs least.

    Source: Lin et al. 2023, arXiv:2306.00978, section 3.2; the loss is that of the outputs.

    Args:
        weights: [out, in] of the layers that share the input.
        magnitudes: [in], mean absolute inputs.
        gram: [in, in], sums of products of calibration inputs.
    """
    best, least = torch.ones_like(magnitudes), float("inf")
    for exponent in _EXPONENTS:
        scale = magnitudes.clamp(min=1e-5) ** exponent
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        loss = 0.0
        for weight in weights:
            rounded = dequantize_ref(quantize_to_codes(weight * scale, BITS, group_of(weight.shape[1])))
            error = rounded / scale - weight
            loss += float(((error @ gram) * error).sum())
        if loss < least:
            best, least = scale, loss
    return best
