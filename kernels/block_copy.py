"""Copies by kernels that reach pinned host memory through the bus themselves.

Whole blocks by a list of pairs: many small ones take one launch where the copy engine takes a call each. And a few
words that somebody waits for: a copy engine would begin them behind all blocks queued before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import tl, triton

_CHUNK = 2048
"""8-byte words that a program moves at a time: 16 KiB in flight each."""
_NUM_WARPS = 8
_FEW_WORDS = 512


def copy_blocks_ref(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Say in plain torch what ``copy_blocks`` does."""
    pairs = pairs.to(source.device).long()
    target[pairs[:, 1].to(target.device)] = source[pairs[:, 0]].to(target.device)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor, num_programs: int = 32) -> None:
    """Copy ``source[pairs[i, 0]]`` to ``target[pairs[i, 1]]`` for all ``i``, in no order.

    Args:
        source: [num_blocks, ...], contiguous; on a GPU, or pinned.
        target: likewise, with blocks of the same size; no block may be written twice, or be read as well.
        pairs: [num_pairs, 2] int32, on the GPU where one of the others is.
        num_programs: that share the work; each keeps a part of a multiprocessor from other kernels.

    Raises:
        ValueError: blocks differ in size, or are no multiple of 8 bytes.
    """
    num_words, rest = divmod(source[0].numel() * source.itemsize, 8)
    if rest or target[0].numel() * target.itemsize != num_words * 8:
        raise ValueError(
            f"blocks of {source[0].numel() * source.itemsize} and {target[0].numel() * target.itemsize} bytes: "
            "they must have one size, a multiple of 8"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("blocks must be contiguous")
    if pairs.device.type == "cpu":
        copy_blocks_ref(source, target, pairs)
    elif len(pairs):
        words = (source.view(torch.int64), target.view(torch.int64))
        _copy_blocks_kernel[(num_programs,)](
            *words, pairs, len(pairs), num_words, CHUNK=_CHUNK, num_warps=_NUM_WARPS
        )


def copy_words(source: Tensor, target: Tensor) -> None:
    """Copy a few numbers, at most some thousand; to pinned memory without a copy engine.

    Args:
        source: [count], contiguous; on a GPU.
        target: [count] of the same dtype, contiguous; on the GPU, or pinned.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"{tuple(source.shape)} {source.dtype} cannot fill {tuple(target.shape)} {target.dtype}"
        )
    if count := source.numel():
        grid = (triton.cdiv(count, _FEW_WORDS),)
        _copy_words_kernel[grid](source, target, count, BLOCK=_FEW_WORDS, num_warps=4)


@triton.jit(do_not_specialize=["count"])
def _copy_words_kernel(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit
def _copy_blocks_kernel(source, target, pairs, num_pairs, num_words, CHUNK: tl.constexpr):
    chunks_a_block = tl.cdiv(num_words, CHUNK)
    lanes = tl.arange(0, CHUNK)
    for item in tl.range(tl.program_id(0), num_pairs * chunks_a_block, tl.num_programs(0), num_stages=3):
        pair = item // chunks_a_block
        offsets = (item % chunks_a_block) * CHUNK + lanes
        first = tl.load(pairs + 2 * pair).to(tl.int64) * num_words
        second = tl.load(pairs + 2 * pair + 1).to(tl.int64) * num_words
        words = tl.load(source + first + offsets, mask=offsets < num_words)
        tl.store(target + second + offsets, words, mask=offsets < num_words)
