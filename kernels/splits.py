"""Products of few rows cut along the inner axis, so that all of a device reads the weight, and their parts' sum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, pdl_options, tl, triton

_SUM_BLOCK = 512


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """How a product is cut: weight rows and tokens a program, parts of the inner axis, and what Triton is told."""

    rows: int
    tokens: int
    splits: int
    step: int
    """Columns an iteration; for codes, groups (of 8 bits) or pairs of groups (of 4)."""
    num_warps: int
    num_stages: int

    def cut(self, length: int) -> tuple[int, int]:
        """Return the length of each part of an inner axis of ``length``, whole steps, and how many parts that gives."""
        share = -(-length // self.splits)
        whole = -(-share // self.step) * self.step
        return whole, -(-length // whole)


def splits_for(num_out: int, rows: int, num_programs: int, num_steps: int) -> int:
    """In how many parts, 8 at most, to cut ``num_steps`` so that there are ``num_programs`` programs or more."""
    splits = 1
    while splits < 8 and -(-num_out // rows) * splits < num_programs and num_steps >= 4 * splits:
        splits *= 2
    return splits


def add_splits(partial: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Sum ``partial`` [splits, num_tokens, out] and ``bias`` into ``out``, on CUDA."""
    splits, num_tokens, num_out = partial.shape
    pdl = has_pdl(out.device)
    _add_splits_kernel[(num_tokens, triton.cdiv(num_out, _SUM_BLOCK))](
        partial,
        bias if bias is not None else out,
        out,
        num_tokens,
        NUM_OUT=num_out,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        BLOCK=_SUM_BLOCK,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _add_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the parts of the inner axis, always in the same order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < NUM_OUT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(
            partial_ptr + (split * tl.cast(num_tokens, tl.int64) + token) * NUM_OUT + columns,
            mask=inside,
            other=0.0,
        )
    tl.store(out_ptr + token * NUM_OUT + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
