"""The gated activation of the MLP: SiLU, or GELU by its tanh formula, of the first half times the second half."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, pdl_options, tl, triton
from kernels.native import native_kernels

_BLOCK = 1024


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """Say in plain torch what ``silu_mul`` must return: float32 inside, the input's dtype outside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(gate_up.dtype)


def gelu_mul_ref(gate_up: Tensor) -> Tensor:
    """Say in plain torch what ``gelu_mul`` must return: float32 inside, the input's dtype outside."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of a merged projection.

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).

    Args:
        gate_up: [num_tokens, 2 * intermediate], gate first, contiguous.

    Raises:
        ValueError: not two-dimensional, an odd last axis, or not contiguous.
    """
    _check(gate_up)
    if gate_up.device.type == "cuda":
        return _launch(gate_up)
    native = native_kernels() if gate_up.dtype == torch.float32 else None
    return native.silu_mul(gate_up) if native is not None else silu_mul_ref(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up`` of a merged projection (GeGLU, same source), with GELU's tanh formula.

    Source of the formula: Hendrycks & Gimpel 2016, arXiv:1606.08415.

    Args:
        gate_up: as in ``silu_mul``.

    Raises:
        ValueError: as ``silu_mul``.
    """
    _check(gate_up)
    return _launch(gate_up, is_gelu=True) if gate_up.device.type == "cuda" else gelu_mul_ref(gate_up)


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}: contiguous [tokens, 2 * intermediate] is needed"
        )


def _launch(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width // 2, _BLOCK))
        pdl = has_pdl(gate_up.device)
        _silu_mul_kernel[grid](
            gate_up, out, width // 2, BLOCK=_BLOCK, IS_GELU=is_gelu, PDL=pdl, num_warps=4, **pdl_options(pdl)
        )
    return out


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr
):
    """One stretch of one row a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = gate_up_ptr + token * 2 * width
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z; z is sqrt(2 / pi) (x + 0.044715 x^3).
        steepness = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    else:
        steepness = gate
    out = gate * tl.sigmoid(steepness) * up
    tl.store(out_ptr + token * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
