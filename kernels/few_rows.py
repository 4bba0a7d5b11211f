"""Products of a few rows, split over the inner axis: parts are summed by whoever reads them next.

With 2 to 64 rows a product is bound by reading its weight, and a weight of few rows has too few tiles to keep all
multiprocessors at it. So the inner axis is cut as well, and ``add_rms_norm_of_parts``, which follows anyway, sums the
parts on its way: no kernel of its own for the sums, as cuBLAS has, and one rounding less. The gate's SiLU meets the
up projection in the registers that hold both. And a layer without cuBLAS is a chain in which each kernel is started
before the one ahead of it has ended.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton
from kernels.rms_norm import rms_norm_ref
from kernels.silu_mul import silu_mul

MAX_ROWS = 64
"""With more, cuBLAS is as fast."""
_FEWEST_PROGRAMS, _FULL_WAVE = 128, 132
"""About the multiprocessors of an H200: less leaves some without work, more gives some twice as much."""
_FEWEST_GATED_ROWS, _FEWEST_GATED_PROGRAMS = 16, 100
_SHORT_OF_STAGES = 16


@dataclass(frozen=True, slots=True)
class FewRowsTiles:
    """Weight rows and inner columns a tile, in how many parts the inner axis is cut, warps and tiles in flight."""

    weight_rows: int
    columns: int
    parts: int
    num_warps: int
    num_stages: int


def linear_parts_ref(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Say in plain torch what ``linear_parts`` must return."""
    num_rows, width = x.shape
    x, weight = x.float().view(num_rows, parts, -1), weight.float().view(-1, parts, width // parts)
    return torch.einsum("mpk,npk->pmn", x, weight)


def linear_parts(x: Tensor, weight: Tensor, tiles: FewRowsTiles | None = None) -> Tensor:
    """Return ``x W^T`` as parts to be summed, [parts, num_rows, out] float32.

    Args:
        x: [at most 64, in], contiguous.
        weight: [out, in], contiguous; see ``fits``.
        tiles: how to cut the work; None: as measured best.

    Raises:
        ValueError: shapes do not fit together.
    """
    tiles = parts_tiles(weight.shape[0], weight.shape[1], x.shape[0]) if tiles is None else tiles
    out = torch.empty(tiles.parts, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, out, tiles)
    return out


def few_rows_linear_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Say in plain torch what ``few_rows_linear`` must return."""
    return (x.float() @ weight.float().T).to(x.dtype)


def few_rows_linear(
    x: Tensor, weight: Tensor, out: Tensor | None = None, tiles: FewRowsTiles | None = None
) -> Tensor:
    """Return ``x W^T`` [num_rows, out] in one part; for weights of many rows, as that of logits.

    Raises:
        ValueError: shapes do not fit together.
    """
    tiles = whole_tiles(weight.shape[0], x.shape[0]) if tiles is None else tiles
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _launch(x, weight, out[None], tiles)
    return out


def few_rows_gate_up_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Say in plain torch what ``few_rows_gate_up`` must return."""
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(x.dtype)


def few_rows_gate_up(x: Tensor, weight: Tensor, tiles: FewRowsTiles | None = None) -> Tensor:
    """Return ``silu(gate) * up`` [num_rows, intermediate]; ``weight`` [2 * intermediate, in] holds gate first.

    Raises:
        ValueError: shapes do not fit together.
    """
    if tiles is None:
        if not fuses_gate(weight, x.shape[0]):
            return silu_mul(few_rows_linear(x, weight))
        tiles = gated_tiles(weight.shape[0] // 2)
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch(x, weight, out[None], tiles, is_gated=True)
    return out


def add_rms_norm_of_parts_ref(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say in plain torch what ``add_rms_norm_of_parts`` must do."""
    residual.copy_(residual.float() + parts.sum(0))
    return rms_norm_ref(residual, weight, eps)


def add_rms_norm_of_parts(parts: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Add all parts to ``residual`` in place and return the sum normalised as ``kernels.rms_norm`` does.

    Args:
        parts: [parts, num_tokens, hidden] float32, contiguous.
        residual: [num_tokens, hidden], contiguous; holds the sum afterwards.
        weight: [hidden].
        eps: added to the mean square.

    Raises:
        ValueError: shapes do not match; nothing was changed.
    """
    num_parts, num_tokens, hidden = parts.shape
    if residual.shape != (num_tokens, hidden) or weight.shape != (hidden,):
        raise ValueError(
            f"parts {tuple(parts.shape)}, residual {tuple(residual.shape)}, weight {tuple(weight.shape)}"
        )
    if not (parts.is_contiguous() and residual.is_contiguous()):
        raise ValueError("parts and residual must be contiguous")
    out = torch.empty_like(residual)
    block, pdl = next_power_of_2(hidden), has_pdl(residual.device)
    _add_rms_norm_of_parts_kernel[(num_tokens,)](
        parts,
        residual,
        weight,
        out,
        num_tokens,
        hidden,
        eps,
        PARTS=num_parts,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 8),
        **pdl_options(pdl),
    )
    return out


def fits(weight: Tensor, num_rows: int) -> bool:
    """True where these products take ``weight`` and are worth it."""
    return (
        2 <= num_rows <= MAX_ROWS
        and weight.shape[0] % 128 == 0
        and weight.shape[1] % 512 == 0
        and weight.element_size() == 2
    )


def fuses_gate(weight: Tensor, num_rows: int) -> bool:
    """True where gate, up and SiLU as one kernel are faster than as two: the tiles of both must be enough.

    16, 32, 64 rows of an 8B model, one kernel and two: 58.0 and 57.4, 58.7 and 59.9, 61.4 and 63.2 us; of its half
    29.5 and 30.4, 30.3 and 31.4, 32.1 and 32.8; of its quarter 17.1 and 16.9, 17.7 and 17.3, 19.0 and 18.5.
    """
    return num_rows > _FEWEST_GATED_ROWS and weight.shape[0] // 128 >= _FEWEST_GATED_PROGRAMS


def parts_tiles(num_out: int, width: int, num_rows: int) -> FewRowsTiles:
    """Tiles for a weight [num_out, width] of few rows: among the fastest of nineteen on an H200, with the norm behind.

    For 16, 32, 64 rows: attention's out projection of an 8B model 11.3, 11.6, 12.7 us (cuBLAS and norm 14.4, 15.1,
    14.5), down 31.6, 31.8, 33.2 (34.3, 35.2, 38.0); down of half a 70B model 58.6, 59.2, 61.5 (62.8, 64.3, 67.0).
    """
    parts = 1
    while num_out // 64 * parts < _FEWEST_PROGRAMS and parts < 8 and width % (256 * parts) == 0:
        parts *= 2
    if width > 8192 and num_rows <= _SHORT_OF_STAGES and width % (256 * parts) == 0:
        parts *= 2
    return FewRowsTiles(64, 128, parts, 4, _stages(num_rows))


def whole_tiles(num_out: int, num_rows: int) -> FewRowsTiles:
    """Tiles for a weight of many rows, whose inner axis need not be cut.

    For 16, 32, 64 rows: logits 242, 246, 258 us (cuBLAS 253, 266, 288).
    """
    if num_out // 64 <= _FULL_WAVE:
        return FewRowsTiles(64, 128, 1, 4, _stages(num_rows))
    return FewRowsTiles(64, 128, 1, 4, 4) if num_rows <= 32 else FewRowsTiles(128, 64, 1, 4, 4)


def _stages(num_rows: int) -> int:
    """Tiles in flight of a weight with one program a multiprocessor.

    With five a product of up to 16 rows is 1 % faster alone, but a step of 8 and 16 rows 2 % slower (4.55 and 4.64 ms,
    with five 4.63 and 4.75): probably since a program no longer fits in where one of the two of gate and up has ended.
    """
    return 4 if num_rows <= _SHORT_OF_STAGES else 5


def gated_tiles(num_out: int) -> FewRowsTiles:
    """Tiles for gate and up with ``num_out`` columns of each; see ``fuses_gate``.

    A multiprocessor needs many bytes in flight: with four tiles 32, 64 rows of an 8B model took 62.8, 63.9 us.
    """
    return FewRowsTiles(128, 64, 1, 4, 5 if num_out // 64 <= _FULL_WAVE else 6)


def _launch(x: Tensor, weight: Tensor, out: Tensor, tiles: FewRowsTiles, is_gated: bool = False) -> None:
    num_rows, width = x.shape
    num_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    # Gate and up share a tile.
    tile_rows = tiles.weight_rows // 2 if is_gated else tiles.weight_rows
    if weight.shape[1] != width or out.shape[1:] != (num_rows, num_out) or num_rows > MAX_ROWS:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}")
    if width % (tiles.parts * tiles.columns) or num_out % tile_rows:
        raise ValueError(f"weight {tuple(weight.shape)} does not come out even in tiles {tiles}")
    if not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()):
        raise ValueError("x, weight and out must be contiguous")
    pdl = has_pdl(x.device)
    padded_rows = max(16, next_power_of_2(num_rows))
    stage_bytes = (tiles.weight_rows + padded_rows) * tiles.columns * x.element_size()
    _few_rows_kernel[(num_out // tile_rows, tiles.parts)](
        x,
        weight,
        out,
        num_rows,
        NUM_OUT=num_out,
        WIDTH=width,
        ROWS=padded_rows,
        WEIGHT_ROWS=tile_rows,
        COLUMNS=tiles.columns,
        PARTS=tiles.parts,
        IS_GATED=is_gated,
        PDL=pdl,
        num_warps=tiles.num_warps,
        num_stages=min(tiles.num_stages, _shared_bytes(x.device) // stage_bytes),
        **pdl_options(pdl),
    )


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take; not where there is no GPU, in Triton's interpreter."""
    if device.type != "cuda":
        return 1 << 30
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of the weight, over one part of the inner axis: the weight is the left operand, since it has more."""
    part_width: tl.constexpr = WIDTH // PARTS
    weight_rows = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    columns = part * part_width + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    weight_place = weight_ptr + weight_rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x_place = x_ptr + rows[:, None] * WIDTH + columns[None, :]
    acc = tl.zeros([WEIGHT_ROWS, ROWS], tl.float32)
    acc_up = tl.zeros([WEIGHT_ROWS, ROWS], tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, part_width, COLUMNS):
        weight = tl.load(weight_place + start)
        x = tl.load(x_place + start, mask=is_row[:, None], other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        if IS_GATED:
            up = tl.load(weight_place + NUM_OUT * WIDTH + start)
            acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision="ieee")
    if IS_GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    out_place = out_ptr + (part * num_rows + rows)[None, :].to(tl.int64) * NUM_OUT + weight_rows[:, None]
    tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _add_rms_norm_of_parts_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    hidden,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = residual_ptr + token * hidden + columns
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + (part * num_tokens + token) * hidden + columns, mask=inside, other=0.0)
    rounded = total.to(residual_ptr.dtype.element_ty)
    tl.store(place, rounded, mask=inside)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(
        out_ptr + token * hidden + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )
