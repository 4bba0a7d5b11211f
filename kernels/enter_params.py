"""Takes up the sampling parameters of new rows: from one array that the host has filled to a tensor for each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.draw import DrawParams
from kernels.jit import tl, triton

PARAM_FIELDS = 8
"""int32 numbers of a row: place, temperature, seed (low, high), choice, min-p, top-k, top-p; floats as their bits."""
_BLOCK = 64


def enter_params_ref(told: Tensor, params: DrawParams) -> None:
    """Say in plain torch what ``enter_params`` must do."""
    filters, rows = params.filters, told[:, 0].long()
    floats = told.view(torch.float32)
    params.temperatures[rows] = floats[:, 1]
    params.seeds[rows] = told[:, 2:4].contiguous().view(torch.int64)[:, 0]
    params.choices[rows] = told[:, 4]
    filters.min_p[rows] = floats[:, 5]
    filters.top_k[rows] = told[:, 6]
    filters.top_p[rows] = floats[:, 7]


def enter_params(told: Tensor, params: DrawParams) -> None:
    """Write each row's parameters to its place.

    Args:
        told: [num_new, PARAM_FIELDS] int32, contiguous.
        params: on the same device.

    Raises:
        ValueError: ``told`` has another shape or type.
    """
    if told.shape[1:] != (PARAM_FIELDS,) or told.dtype != torch.int32 or not told.is_contiguous():
        raise ValueError(
            f"parameters are {tuple(told.shape)} {told.dtype}, not [num_new, {PARAM_FIELDS}] int32"
        )
    if told.device.type == "cpu":
        enter_params_ref(told, params)
    elif len(told):
        _launch(told, params)


def _launch(told: Tensor, params: DrawParams) -> None:
    filters = params.filters
    _enter_params_kernel[(triton.cdiv(len(told), _BLOCK),)](
        told,
        len(told),
        params.temperatures,
        params.seeds,
        params.choices,
        filters.min_p,
        filters.top_k,
        filters.top_p,
        FIELDS=PARAM_FIELDS,
        BLOCK=_BLOCK,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["num_new"])
def _enter_params_kernel(
    told_ptr,
    num_new,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows a program."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_new = index < num_new
    told = told_ptr + index * FIELDS
    row = tl.load(told, mask=is_new, other=0)
    temperature = tl.load(told + 1, mask=is_new, other=0).to(tl.float32, bitcast=True)
    low = tl.load(told + 2, mask=is_new, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(told + 3, mask=is_new, other=0).to(tl.int64)
    min_p = tl.load(told + 5, mask=is_new, other=0).to(tl.float32, bitcast=True)
    top_p = tl.load(told + 7, mask=is_new, other=0).to(tl.float32, bitcast=True)
    tl.store(temperatures_ptr + row, temperature, mask=is_new)
    tl.store(seeds_ptr + row, (high << 32) | low, mask=is_new)
    tl.store(choices_ptr + row, tl.load(told + 4, mask=is_new, other=0), mask=is_new)
    tl.store(min_p_ptr + row, min_p, mask=is_new)
    tl.store(top_k_ptr + row, tl.load(told + 6, mask=is_new, other=0), mask=is_new)
    tl.store(top_p_ptr + row, top_p, mask=is_new)
