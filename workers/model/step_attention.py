"""Attention of one layer for all rows of a step: decoding rows and prompts, whichever kernels the device has."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.chunk_attention import chunk_attention
from kernels.decode_attention_work import DecodeAttention, decode_attention
from kernels.paged_decode_attention import paged_decode_attention
from kernels.prefill_attention import prefill_attention
from workers.model.step_inputs import StepInputs


def attend(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    inputs: StepInputs,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    num_rows: int = 0,
) -> Tensor:
    """Return what each token of the step attends to; its keys and values are in the cache already.

    Args:
        q: [num_tokens, heads of this rank, head_dim].
        kv_cache: all layers' blocks.
        layer: which layer of the cache.
        inputs: the step.
        scale: factor on the scores.
        window: how many of the last tokens count, 0 for all.
        soft_cap: bound on the scaled scores, 0 for none.
        num_rows: of the result at least; rows beyond the step's tokens are zeros. Without ``decode_work``.

    Returns:
        [num_tokens or num_rows, heads, head_dim].
    """
    if inputs.decode_work is not None:
        return _attend_by_work(q, kv_cache, layer, inputs, inputs.decode_work, scale, window, soft_cap)
    num_tokens, num_decodes = inputs.num_tokens, inputs.num_decodes
    parts: list[Tensor] = []
    if num_decodes:
        parts.append(
            paged_decode_attention(
                q[:num_decodes],
                kv_cache,
                layer,
                inputs.decode_block_tables,
                inputs.decode_context_lens,
                scale,
                inputs.max_decode_context_len,
                window,
                soft_cap,
            )
        )
    if num_decodes < num_tokens:
        parts.append(
            prefill_attention(
                q[num_decodes:],
                kv_cache,
                layer,
                inputs.prefill_block_tables,
                inputs.prefill_query_starts,
                inputs.prefill_context_lens,
                scale,
                window=window,
                soft_cap=soft_cap,
                tiles=inputs.prefill_tiles,
            )
        )
    if num_rows > num_tokens:
        parts.append(q.new_zeros(num_rows - num_tokens, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scaled(attended: Tensor, value_scale: float) -> Tensor:
    """Undo in place what values were divided by before they were rounded to 8 bits."""
    return attended if value_scale == 1.0 else attended.mul_(value_scale)


def _attend_by_work(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    inputs: StepInputs,
    work: DecodeAttention,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """Both kinds of rows into one tensor; decoding rows on CUDA only."""
    out = torch.empty_like(q)
    if inputs.num_decodes:
        decode_attention(q, kv_cache, layer, work, scale, out, window, soft_cap)
    if inputs.prefill_chunks is not None:
        tables, chunks = inputs.prefill_block_tables, inputs.prefill_chunks
        chunk_attention(q, kv_cache, layer, tables, chunks, scale, out, window, soft_cap)
    elif inputs.num_decodes < inputs.num_tokens:
        prefill_attention(
            q,
            kv_cache,
            layer,
            inputs.prefill_block_tables,
            inputs.prefill_query_starts,
            inputs.prefill_context_lens,
            scale,
            out,
            window,
            soft_cap,
            tiles=inputs.prefill_tiles,
        )
    return out
