"""A mixture of experts: which experts a token is given to, and the experts' products, all in one launch each.

Pairs of token and expert are sorted by expert; tiles of one expert's rows then multiply that expert's weight. How many
tiles there are depends on the numbers of pairs and experts alone, not on the router, so that a CUDA graph can hold it.
Idea: MegaBlocks (Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of token and expert, sorted by expert."""

    pairs: Tensor
    """[num_tokens * top_k] int64: ``token * top_k + choice`` of each pair, in sorted order."""
    starts: Tensor
    """[num_experts + 1] int32: where each expert's pairs begin."""
    weights: Tensor
    """[num_tokens, top_k] float32."""

    @property
    def top_k(self) -> int:
        """Experts a token."""
        return self.weights.shape[1]


def route(logits: Tensor, top_k: int, has_normed_weights: bool) -> Routing:
    """Give each token to the ``top_k`` experts with the largest softmax of ``logits`` [num_tokens, num_experts].

    Works on any device, without waiting for it.
    """
    weights, chosen = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if has_normed_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    pairs = torch.argsort(flat, stable=True)
    experts = torch.arange(logits.shape[1], device=logits.device)
    counts = (flat[None, :] == experts[:, None]).sum(1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return Routing(pairs, starts, weights)


def expert_linear_ref(x: Tensor, weights: Tensor, routing: Routing, is_spread: bool) -> Tensor:
    """Say in plain torch what ``expert_linear`` must return."""
    pairs, starts, top_k = routing.pairs, routing.starts.tolist(), routing.top_k
    out = x.new_empty(pairs.shape[0], weights.shape[1])
    for expert, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            index = pairs[start:end]
            rows = x[start:end] if is_spread else x[index // top_k]
            product = rows.float() @ weights[expert].float().T
            if is_spread:
                scaled = product * routing.weights.flatten()[index, None]
                out[index] = scaled.to(x.dtype)
            else:
                out[start:end] = product.to(x.dtype)
    return out


def expert_linear(x: Tensor, weights: Tensor, routing: Routing, is_spread: bool) -> Tensor:
    """Multiply each pair's row by its expert's weight.

    Args:
        x: [num_tokens, in], or, with ``is_spread``, [num_pairs, in] in sorted order.
        weights: [num_experts, out, in], contiguous.
        routing: the pairs.
        is_spread: put each result, times the pair's weight, at the pair's own place instead of in sorted order.

    Returns:
        [num_pairs, out] in x's dtype.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_pairs = routing.pairs.shape[0]
    num_rows = num_pairs if is_spread else num_pairs // routing.top_k
    if x.shape != (num_rows, weights.shape[2]) or weights.shape[0] != routing.starts.shape[0] - 1:
        raise ValueError(f"x {tuple(x.shape)}, weights {tuple(weights.shape)}, {num_pairs} pairs")
    if not (x.is_contiguous() and weights.is_contiguous()):
        raise ValueError("x and weights must be contiguous")
    if x.device.type != "cuda":
        return expert_linear_ref(x, weights, routing, is_spread)
    return _launch(x, weights, routing, is_spread)


def expert_tiles(num_pairs: int, num_experts: int) -> tuple[int, int, int, int, int]:
    """Return weight rows, pairs and columns a step, warps, stages, by how many pairs an expert has on average."""
    average = -(-num_pairs // num_experts)
    if average <= 16:
        return 64, 16, 128, 4, 4
    if average <= 64:
        return 64, min(next_power_of_2(average), 64), 64, 4, 4
    return 128, 128, 64, 8, 3


def _launch(x: Tensor, weights: Tensor, routing: Routing, is_spread: bool) -> Tensor:
    num_experts, num_out, width = weights.shape
    num_pairs = routing.pairs.shape[0]
    out = x.new_empty(num_pairs, num_out)
    if num_pairs == 0:
        return out
    rows, tile, step, num_warps, num_stages = expert_tiles(num_pairs, num_experts)
    pdl = has_pdl(x.device)
    # An expert of n pairs has at most n // tile + 1 tiles.
    num_tiles = num_pairs // tile + num_experts
    _expert_linear_kernel[(triton.cdiv(num_out, rows), num_tiles)](
        x,
        weights,
        routing.pairs,
        routing.starts,
        routing.weights,
        out,
        NUM_EXPERTS=num_experts,
        NUM_OUT=num_out,
        WIDTH=width,
        TOP_K=routing.top_k,
        IS_SPREAD=is_spread,
        ROWS=rows,
        TILE=tile,
        STEP=step,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(pdl),
    )
    return out


@triton.jit
def expert_tile(tile, starts_ptr, NUM_EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Return the expert of a tile of pairs, the tile's first pair and the expert's end; no pairs if they meet.

    Expert e owns tiles from ``starts[e] // TILE + e`` on: this is the last one that starts no later than ``tile``.
    """
    low = 0
    high = NUM_EXPERTS
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    expert = low - 1
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    return expert, start + (tile - (start // TILE + expert)) * TILE, end


@triton.jit
def _expert_linear_kernel(
    x_ptr,
    weights_ptr,
    pairs_ptr,
    starts_ptr,
    pair_weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of one expert's weight times some of its pairs a program."""
    tile = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end = expert_tile(tile, starts_ptr, NUM_EXPERTS, TILE)
    if first >= end:
        return
    places = first + tl.arange(0, TILE)
    is_pair = places < end
    pairs = tl.load(pairs_ptr + places, mask=is_pair, other=0)
    sources = places.to(tl.int64) if IS_SPREAD else pairs // TOP_K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept_rows = tl.minimum(rows, NUM_OUT - 1)
    columns = tl.arange(0, STEP)
    weight_place = (
        weights_ptr
        + (tl.cast(expert, tl.int64) * NUM_OUT + kept_rows.to(tl.int64))[:, None] * WIDTH
        + columns[None, :]
    )
    x_place = x_ptr + sources[None, :] * WIDTH + columns[:, None]
    acc = tl.zeros([ROWS, TILE], tl.float32)
    for begin in tl.range(0, WIDTH, STEP):
        if WIDTH % STEP:
            inside = begin + columns < WIDTH
            weight = tl.load(weight_place + begin, mask=inside[None, :], other=0.0)
            x = tl.load(x_place + begin, mask=inside[:, None] & is_pair[None, :], other=0.0)
        else:
            weight = tl.load(weight_place + begin)
            x = tl.load(x_place + begin, mask=is_pair[None, :], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    if IS_SPREAD:
        acc *= tl.load(pair_weights_ptr + pairs, mask=is_pair, other=0.0)[None, :]
        targets = pairs
    else:
        targets = places.to(tl.int64)
    tl.store(
        out_ptr + targets[None, :] * NUM_OUT + rows[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows < NUM_OUT)[:, None] & is_pair[None, :],
    )
