"""Sum over the ranks of a group in one kernel, with the residual addition and the norm that follow folded in.

Every rank writes its rows into the memory of all others, waits for theirs and adds in rank order, so that all ranks
hold the same bits. One-shot all-reduce as in NVIDIA's TensorRT-LLM and vLLM; two ways to say that a row has come:

- *flagged*: each element travels in a word with the number of the exchange beside it, and a word is written whole. No
  fence and no second message, at twice the bytes (the LL protocol of NCCL, ``src/device/prims_ll.h``).
- *staged*: elements as they are, then a fence and one number a row.

Knows addresses, not how they came about: ``workers.model.symmetric_memory`` maps what all ranks reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.rms_norm import rms_norm_ref

_SLOTS = 2
"""A rank sends its row for the next exchange but one only after it has got the others' for the next, and they have
sent those after reading what this rank sent before: two places a row are enough."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of this rank that the others write to, and where theirs is."""

    rank: int
    own: Tensor
    """[bytes] uint8, zeros before the first exchange of any rank."""
    addresses: Tensor
    """[ranks] int64: where the memory of each rank begins, as this rank sees it."""
    turns: Tensor
    """[max rows] int32, zeros before the first exchange: how often each row has been exchanged."""
    width: int
    """Elements of a row."""
    dtype: torch.dtype
    is_flagged: bool

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self.addresses.shape[0]

    @property
    def max_rows(self) -> int:
        """Most rows of one exchange."""
        return self.turns.shape[0]


def peer_memory_bytes(num_ranks: int, max_rows: int, width: int, dtype: torch.dtype, is_flagged: bool) -> int:
    """Return how long ``PeerMemory.own`` must be."""
    num_rows = _SLOTS * num_ranks * max_rows
    if is_flagged:
        return num_rows * width * 2 * dtype.itemsize
    return num_rows * (width * dtype.itemsize + 4)


def reduce_add_rms_norm_ref(
    parts: list[Tensor], residual: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """Say in plain torch what ``reduce_add_rms_norm`` must do, given what each rank brings."""
    total = residual.float()
    summed = parts[0].float()
    for part in parts[1:]:
        summed = summed + part.float()
    residual.copy_(total + summed)
    return residual if weight is None else rms_norm_ref(residual, weight, eps)


def reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, peers: PeerMemory
) -> Tensor:
    """Add the sum of ``x`` over ranks to ``residual`` in place and return it normalised, as ``add_rms_norm`` does.

    All ranks of the group must call it with the same shapes, in the same order. It waits on the device for the others.

    Args:
        x: [num_tokens, width], contiguous: this rank's part.
        residual: same shape and dtype, contiguous; the same on all ranks, before and after.
        weight: [width] of the norm; None: only the sum is wanted, and ``residual`` itself is returned.
        eps: added to the mean square.
        peers: memory for rows of this width and dtype.

    Raises:
        ValueError: shapes or dtypes do not fit; nothing was sent.
    """
    num_tokens = _check(x, residual, weight, peers)
    out = residual if weight is None else torch.empty_like(x)
    if num_tokens == 0:
        return out
    _launch(x, residual, weight, out, eps, peers, has_residual=True)
    return out


def reduce_add_rms_norm_of_parts(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: PeerMemory
) -> Tensor:
    """``reduce_add_rms_norm`` where this rank's part is itself a sum, as ``few_rows.linear_parts`` gives it.

    Args:
        parts: [parts, num_tokens, width] float32, contiguous; their sum is rounded to the residual's dtype.
        residual: [num_tokens, width], as the others.
        weight: see ``reduce_add_rms_norm``, as the others.
        eps: added to the mean square.
        peers: memory for rows of this width and dtype.

    Raises:
        ValueError: shapes or dtypes do not fit; nothing was sent.
    """
    num_tokens = _check(residual, residual, weight, peers)
    if parts.shape[1:] != residual.shape or parts.dtype != torch.float32 or not parts.is_contiguous():
        raise ValueError(
            f"parts {tuple(parts.shape)} {parts.dtype} do not match residual {tuple(residual.shape)}"
        )
    out = torch.empty_like(residual)
    if num_tokens:
        _launch(parts, residual, weight, out, eps, peers, has_residual=True, num_parts=parts.shape[0])
    return out


def all_reduce(x: Tensor, peers: PeerMemory) -> Tensor:
    """Replace ``x`` [num_tokens, width] by its sum over ranks; see ``reduce_add_rms_norm``.

    Raises:
        ValueError: shape or dtype do not fit; nothing was sent.
    """
    if _check(x, x, None, peers):
        _launch(x, x, None, x, 0.0, peers, has_residual=False)
    return x


def _check(x: Tensor, residual: Tensor, weight: Tensor | None, peers: PeerMemory) -> int:
    if x.dim() != 2 or x.shape[1] != peers.width or x.dtype != peers.dtype or x.shape[0] > peers.max_rows:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit peer memory of {peers.max_rows} rows of {peers.width} "
            f"{peers.dtype}"
        )
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not match x")
    if weight is not None and weight.shape != (peers.width,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, x needs ({peers.width},)")
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    return x.shape[0]


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    peers: PeerMemory,
    has_residual: bool,
    num_parts: int = 0,
) -> None:
    block = next_power_of_2(peers.width)
    pdl = has_pdl(x.device)
    num_data_bytes = _SLOTS * peers.num_ranks * peers.max_rows * peers.width * peers.dtype.itemsize
    _reduce_kernel[(residual.shape[0],)](
        x,
        residual,
        weight if weight is not None else x,
        out,
        peers.own,
        peers.addresses,
        peers.turns,
        eps,
        WIDTH=peers.width,
        MAX_ROWS=peers.max_rows,
        RANK=peers.rank,
        NUM_RANKS=peers.num_ranks,
        FLAG_OFFSET=num_data_bytes,
        IS_FLAGGED=peers.is_flagged,
        IS_WIDE=peers.dtype.itemsize == 4,
        PARTS=num_parts,
        HAS_RESIDUAL=has_residual,
        HAS_NORM=weight is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=reduce_warps(block),
        **pdl_options(pdl),
    )


def reduce_warps(block: int) -> int:
    """Warps of a program that takes a row of ``block`` elements: 16 elements a thread."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _reduce_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    own_ptr,
    addresses_ptr,
    turns_ptr,
    eps,
    WIDTH: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    FLAG_OFFSET: tl.constexpr,
    IS_FLAGGED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program, which first sends and then waits: programs of one row on all ranks need no others to run."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    word_type: tl.constexpr = tl.int64 if IS_WIDE else tl.int32
    bits_type: tl.constexpr = tl.int32 if IS_WIDE else tl.int16
    value_type: tl.constexpr = residual_ptr.dtype.element_ty
    num_bits: tl.constexpr = 32 if IS_WIDE else 16
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turns_ptr + row) + 1
    slot = (turn & 1).to(tl.int64)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * tl.num_programs(0) + row) * WIDTH + columns, mask=inside, other=0.0)
    x = x.to(value_type)  # what the others get is also what this rank adds
    flag = (turn & 0x7FFF).to(word_type)
    if IS_FLAGGED:
        bits = x.to(bits_type, bitcast=True).to(word_type)
        low: tl.constexpr = 0xFFFFFFFF if IS_WIDE else 0xFFFF
        words = (flag << num_bits) | (bits & low)
    # Send.
    place = ((slot * NUM_RANKS + RANK) * MAX_ROWS + row) * WIDTH
    for peer in tl.static_range(NUM_RANKS):
        if peer != RANK:
            address = tl.load(addresses_ptr + peer)
            if IS_FLAGGED:
                theirs = tl.multiple_of(address.to(tl.pointer_type(word_type)), 16)
                tl.store(theirs + place + columns, words, mask=inside)
            else:
                theirs = tl.multiple_of(address.to(tl.pointer_type(value_type)), 16)
                tl.store(theirs + place + columns, x, mask=inside)
    if not IS_FLAGGED:
        tl.debug_barrier()  # the fence of one thread covers what the others have stored before the barrier
        place = (slot * NUM_RANKS + RANK) * MAX_ROWS + row
        for peer in tl.static_range(NUM_RANKS):
            if peer != RANK:
                flags = (tl.load(addresses_ptr + peer) + FLAG_OFFSET).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flags + place, turn, sem="release", scope="sys")
    # What needs no other rank is read while their rows are on the way.
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    # Receive, in the order of ranks.
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        if peer == RANK:
            total += x.to(tl.float32)
        else:
            source = (slot * NUM_RANKS + peer) * MAX_ROWS + row
            if IS_FLAGGED:
                mine = own_ptr.to(tl.pointer_type(word_type)) + source * WIDTH + columns
                got = tl.load(mine, mask=inside, other=0, volatile=True)
                num_late = tl.sum((inside & ((got >> num_bits) != flag)).to(tl.int32), axis=0)
                while num_late > 0:
                    got = tl.load(mine, mask=inside, other=0, volatile=True)
                    num_late = tl.sum((inside & ((got >> num_bits) != flag)).to(tl.int32), axis=0)
                total += got.to(bits_type).to(value_type, bitcast=True).to(tl.float32)
            else:
                arrived = (own_ptr + FLAG_OFFSET).to(tl.pointer_type(tl.int32)) + source
                seen = tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
                while seen != turn:
                    seen = tl.atomic_add(arrived, 0, sem="acquire", scope="sys")
                mine = own_ptr.to(tl.pointer_type(value_type)) + source * WIDTH + columns
                total += tl.load(mine, mask=inside, other=0.0, volatile=True).to(tl.float32)
    tl.store(turns_ptr + row, turn)
    if HAS_RESIDUAL:
        total += residual
    summed = total.to(value_type)
    tl.store(residual_ptr + row * WIDTH + columns, summed, mask=inside)
    if HAS_NORM:
        total = summed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.where(inside, total * total, 0.0), axis=0) / WIDTH + eps)
        tl.store(out_ptr + row * WIDTH + columns, (total * scale * weight).to(value_type), mask=inside)
