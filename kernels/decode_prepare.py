"""The start of a decode step on the device: from places in the batch to tokens, slots and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import gdc_launch_dependents, gdc_wait, has_pdl, next_power_of_2, pdl_options, tl, triton

_STEP = 1024


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """What the host says of a step, [max rows] int32 each but ``num_rows``; entries from ``num_rows`` on are old."""

    num_rows: Tensor
    """[1]."""
    rows: Tensor
    """Places in the batch."""
    starts: Tensor
    """Position of the token to compute."""
    new_blocks: Tensor
    """The block that begins at that position, or -1 where it has one."""


def decode_prepare_ref(
    columns: DecodeColumns,
    token_ids: Tensor,
    block_tables: Tensor,
    embedding: Tensor,
    block_size: int,
    positions: Tensor,
    slots: Tensor,
    hidden: Tensor,
    first_token: int = 0,
) -> None:
    """Say in plain torch what ``decode_prepare`` must do."""
    num_rows = int(columns.num_rows)
    rows, starts = columns.rows[:num_rows].long(), columns.starts[:num_rows].long()
    places = starts // block_size
    blocks = columns.new_blocks[:num_rows]
    blocks = torch.where(blocks >= 0, blocks, block_tables[rows, places])
    block_tables[rows, places] = blocks
    positions.zero_()
    slots.fill_(-1)
    positions[:num_rows] = starts
    slots[:num_rows] = blocks.long() * block_size + starts % block_size
    local = torch.full((hidden.shape[0],), -first_token, device=hidden.device)
    local[:num_rows] += token_ids[rows, starts]
    is_own = (local >= 0) & (local < embedding.shape[0])
    hidden.copy_(torch.where(is_own[:, None], embedding[local.where(is_own, 0)], 0.0))


def decode_prepare(
    columns: DecodeColumns,
    token_ids: Tensor,
    block_tables: Tensor,
    embedding: Tensor,
    block_size: int,
    positions: Tensor,
    slots: Tensor,
    hidden: Tensor,
    first_token: int = 0,
) -> None:
    """Enter new blocks into the tables; fill positions, slots and embeddings of a step's tokens.

    Rows from ``num_rows`` on are padding: position 0, slot -1, the embedding of token 0.

    Args:
        columns: the step.
        token_ids: [max_num_seqs, max tokens] int32, of each place in the batch.
        block_tables: [max_num_seqs, blocks] int32.
        embedding: [vocab of this rank, hidden], contiguous.
        block_size: tokens a block.
        positions: [padded rows] int64, to be filled.
        slots: [padded rows] int64, to be filled.
        hidden: [padded rows, hidden], contiguous, to be filled.
        first_token: the token of the embedding's first row; tokens that this rank does not have become zeros.

    Raises:
        ValueError: shapes do not fit together.
    """
    num_padded, width = hidden.shape
    if embedding.shape[1] != width or positions.shape != (num_padded,) or slots.shape != (num_padded,):
        raise ValueError(f"hidden {tuple(hidden.shape)}, embedding {tuple(embedding.shape)}: they do not fit")
    if not (hidden.is_contiguous() and embedding.is_contiguous()):
        raise ValueError("hidden and embedding must be contiguous")
    pdl = has_pdl(hidden.device)
    _decode_prepare_kernel[(num_padded, triton.cdiv(width, _STEP))](
        columns.num_rows,
        columns.rows,
        columns.starts,
        columns.new_blocks,
        token_ids,
        block_tables,
        embedding,
        positions,
        slots,
        hidden,
        token_ids.stride(0),
        block_tables.stride(0),
        first_token,
        embedding.shape[0],
        BLOCK_SIZE=block_size,
        WIDTH=width,
        STEP=min(_STEP, next_power_of_2(width)),
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )


@triton.jit
def _decode_prepare_kernel(
    num_rows_ptr,
    rows_ptr,
    starts_ptr,
    new_blocks_ptr,
    token_ids_ptr,
    block_tables_ptr,
    embedding_ptr,
    positions_ptr,
    slots_ptr,
    hidden_ptr,
    token_stride,
    table_stride,
    first_token,
    vocab,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A stretch of one row's embedding a program; the first of a row does its bookkeeping."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    columns = part * STEP + tl.arange(0, STEP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_real = index < tl.load(num_rows_ptr)
    row = tl.load(rows_ptr + index, mask=is_real, other=0).to(tl.int64)
    start = tl.load(starts_ptr + index, mask=is_real, other=0)
    if part == 0:
        block = tl.load(new_blocks_ptr + index, mask=is_real, other=-1)
        entry = block_tables_ptr + row * table_stride + start // BLOCK_SIZE
        if block >= 0:
            tl.store(entry, block)
        else:
            block = tl.load(entry, mask=is_real, other=-1)
        slot = block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
        tl.store(slots_ptr + index, tl.where(is_real, slot, -1))
        tl.store(positions_ptr + index, start.to(tl.int64))
    token = tl.load(token_ids_ptr + row * token_stride + start, mask=is_real, other=0).to(tl.int64)
    token -= first_token
    inside = (columns < WIDTH) & (token >= 0) & (token < vocab)
    embedded = tl.load(embedding_ptr + token * WIDTH + columns, mask=inside, other=0.0)
    tl.store(hidden_ptr + index.to(tl.int64) * WIDTH + columns, embedded, mask=columns < WIDTH)
