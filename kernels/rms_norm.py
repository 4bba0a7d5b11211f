"""Root-mean-square normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.native import native_kernels


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say in plain torch what ``rms_norm`` must return: float32 inside, ``x.dtype`` outside."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight.float()).to(x.dtype)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say in plain torch what ``add_rms_norm`` must do: the sum is rounded to ``residual.dtype``, then normalised."""
    residual.add_(x)
    return rms_norm_ref(residual, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each row of ``x`` to unit root-mean-square, then by ``weight``.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.

    Args:
        x: [num_tokens, hidden], last axis contiguous.
        weight: [hidden].
        eps: added to the mean square, in units of x squared.

    Raises:
        ValueError: ``weight`` does not match the last axis of ``x``.
    """
    _check(x, weight)
    return _dispatch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Add ``x`` to ``residual`` in place and return the sum normalised as ``rms_norm`` does.

    Args:
        x: [num_tokens, hidden], last axis contiguous.
        residual: same shape and dtype; holds the sum afterwards.
        weight: [hidden].
        eps: added to the mean square.

    Raises:
        ValueError: shapes or dtypes do not match; nothing was changed.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1:
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} does not match x {tuple(x.shape)} {x.dtype}"
        )
    return _dispatch(x, residual, weight, eps)


def add_two_rms_norm(x: Tensor, other: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Do what ``add_rms_norm`` does with ``x + other``, which is not rounded before the residual is added.

    Args:
        x, other: [num_tokens, hidden], last axis contiguous, of ``residual``'s dtype.
        residual, weight, eps: see ``add_rms_norm``.

    Raises:
        ValueError: shapes or dtypes do not match; nothing was changed.
    """
    _check(x, weight)
    for one in (other, residual):
        if one.shape != x.shape or one.dtype != x.dtype or one.stride(-1) != 1:
            raise ValueError(f"{tuple(one.shape)} {one.dtype} does not match x {tuple(x.shape)} {x.dtype}")
    if x.device.type == "cuda":
        return _launch(x, residual, weight, eps, other=other)
    residual.copy_(residual.float() + (x.float() + other.float()))
    return rms_norm(residual, weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.shape != (x.shape[1],):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}: [tokens, hidden] and [hidden]"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the last axis of x and weight must be contiguous")


def _dispatch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if x.device.type == "cuda":
        return _launch(x, residual, weight, eps)
    native = native_kernels() if x.dtype == weight.dtype == torch.float32 and x.is_contiguous() else None
    if native is not None and (residual is None or residual.is_contiguous()):
        return native.rms_norm(x, residual, weight, eps)
    return rms_norm_ref(x, weight, eps) if residual is None else add_rms_norm_ref(x, residual, weight, eps)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, other: Tensor | None = None
) -> Tensor:
    num_tokens, hidden = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block = next_power_of_2(hidden)
    pdl = has_pdl(x.device)
    _rms_norm_kernel[(num_tokens,)](
        x,
        other if other is not None else x,
        residual if residual is not None else x,
        weight,
        out,
        x.stride(0),
        other.stride(0) if other is not None else 0,
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        hidden,
        eps,
        HAS_OTHER=other is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(pdl),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    other_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    other_stride,
    residual_stride,
    out_stride,
    hidden,
    eps,
    HAS_OTHER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: y = (x + r) / sqrt(mean((x + r)^2) + eps) * w, and r = x + r."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_OTHER:
        x += tl.load(other_ptr + token * other_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + token * residual_stride + columns
        total = (x + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * out_stride + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )
