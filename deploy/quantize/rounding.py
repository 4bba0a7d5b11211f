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
_EXPONENTS = tuple(step / 20 for step in range(20))
"""Tried for AWQ's scales, as in the paper."""


def group_of(width: int) -> int:
    """The largest group up to 128 that divides ``width``: 64 for SmolLM's 576."""
    group = GROUP
    while width % group:
        group //= 2
    return group


def round_gptq(weight: Tensor, gram: Tensor) -> Codes:
    """Round ``weight`` [out, in] column by column; each column's error is made good by those not yet rounded.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1.

    Args:
        weight: [out, in].
        gram: [in, in], sums of products of calibration inputs.
    """
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
                codes = quantize_to_codes(rest[:, column : column + group], BITS, group)
                assert codes.scales is not None, "codes without a table have scales"
                assert codes.zeros is not None, "rounding to nearest gives zero points"
                scale, zero = codes.scales[:, 0].half().float(), codes.zeros[:, 0].float()
                scales.append(scale)
                zeros.append(zero)
            code = (rest[:, column] / scale + zero).round().clamp(0, (1 << BITS) - 1)
            values[:, column] = code.to(torch.uint8)
            error = (rest[:, column] - (code - zero) * scale) / feedback[column, column]
            rest[:, column:end] -= error[:, None] * feedback[column, column:end]
            errors[:, column - start] = error
        rest[:, end:] -= errors @ feedback[start:end, end:]
    return Codes(values, BITS, group, torch.stack(scales, 1), torch.stack(zeros, 1).to(torch.int16))


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
