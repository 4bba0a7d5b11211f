"""The gated activation of the MLP: SiLU of the first half times the second half."""

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


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of a merged projection.

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).

    Args:
        gate_up: [num_tokens, 2 * intermediate], gate first, contiguous.

    Raises:
        ValueError: not two-dimensional, an odd last axis, or not contiguous.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}: contiguous [tokens, 2 * intermediate] is needed"
        )
    if gate_up.device.type == "cuda":
        return _launch(gate_up)
    native = native_kernels() if gate_up.dtype == torch.float32 else None
    return native.silu_mul(gate_up) if native is not None else silu_mul_ref(gate_up)


def _launch(gate_up: Tensor) -> Tensor:
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width // 2, _BLOCK))
        pdl = has_pdl(gate_up.device)
        _silu_mul_kernel[grid](
            gate_up, out, width // 2, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **pdl_options(pdl)
        )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
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
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
