"""Rows of a launched step on CUDA whose sampling waits for masks, and how they are sampled once these are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.draw import draw
from kernels.token_mask import forbid
from kernels.vocab_shard import VocabShard
from workers.model.batch import Batch
from workers.model.decode_buffers import DecodeBuffers
from workers.model.row_sampler import SampledLogprobs, SampledRow


@dataclass(slots=True)
class DeferredRows:
    """What is kept of them until then."""

    places: list[int]
    rows: list[SampledRow]
    logits: Tensor
    """A copy: the next step overwrites the step's own."""
    are_plain: bool
    """``kernels.draw`` samples them, once tokens are forbidden."""
    token_ids: Tensor | None = None
    """On their way to the host once sampled."""
    logprobs: SampledLogprobs | None = None


def draw_masked(
    late: DeferredRows, masks: Mapping[int, bytes], buffers: DecodeBuffers, batch: Batch, vocab: VocabShard
) -> Tensor:
    """Draw a token for each of the rows, all of them plain, and store it behind the row's tokens; [num_rows] int32.

    The launches are those of a step's own draw and one before them: sampling as other rows are sampled takes some 150.

    Args:
        masks: by index in ``late.rows``; others may take any token.
        vocab: which tokens the logits are of.
    """
    count = len(late.rows)
    if masks:
        device = late.logits.device
        packed = packed_masks(masks, count, vocab.own, is_pinned=device.type == "cuda")
        forbid(late.logits, _to_device(packed, device))
    # Columns begin at multiples of 16 bytes, as a step's own do: so the kernels compiled for those serve here too.
    told = torch.zeros(3, -(-count // 4) * 4, dtype=torch.int32)
    told[0, 0] = count
    told[1, :count] = torch.tensor([row.row for row in late.rows])
    told[2, :count] = torch.tensor([row.position - 1 for row in late.rows])
    num_rows, rows, starts = _to_device(told, late.logits.device)
    drawn = torch.empty(count, dtype=torch.int32, device=late.logits.device)
    draw(
        late.logits,
        buffers.params,
        num_rows,
        rows,
        starts,
        batch.token_ids,
        drawn,
        buffers.scratch,
        buffers.share,
    )
    return drawn


def packed_masks(masks: Mapping[int, bytes], num_rows: int, own: range, *, is_pinned: bool = False) -> Tensor:
    """Masks of all rows, of the tokens ``own`` alone, which begin with a byte; [num_rows, bytes] uint8.

    Each is copied once, to where the device reads it if ``is_pinned``: 64 masks of 128,256 tokens are a megabyte, and
    memory that is new to the process costs more than the copy.
    """
    first_byte, num_bytes = own.start // 8, -(-len(own) // 8)
    packed = torch.empty(num_rows, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    rows = packed.numpy().data.cast("B")
    anything = b"\xff" * num_bytes
    for index in range(num_rows):
        allowed = masks.get(index)
        if allowed is not None:
            allowed = allowed[first_byte : first_byte + num_bytes].ljust(num_bytes, b"\0")
        rows[index * num_bytes : (index + 1) * num_bytes] = anything if allowed is None else allowed
    return packed


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
