"""Small integers packed into 32-bit words, as AWQ, GPTQ, SqueezeLLM and compressed-tensors store them."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BITS = 32


def unpack_bits(words: Tensor, bits: int, axis: int, count: int) -> Tensor:
    """Read ``count`` integers of ``bits`` bits along ``axis`` of int32 ``words``, lowest bits first.

    Words are one stream of bits: where ``bits`` does not divide 32, an integer may begin in one and end in the next.

    Returns:
        uint8, ``axis`` grown to ``count``.
    """
    words = words.movedim(axis, -1)
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits, device=words.device, dtype=torch.int32)
        values = (words[..., None] >> shifts) & ((1 << bits) - 1)
        values = values.to(torch.uint8).flatten(-2)[..., :count]
        return values.movedim(-1, axis)
    starts = torch.arange(count, device=words.device) * bits
    index, shifts = starts // _WORD_BITS, starts % _WORD_BITS
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.nn.functional.pad(unsigned, (0, 1))
    pairs = following[..., index] | following[..., index + 1] << _WORD_BITS
    return ((pairs >> shifts) & ((1 << bits) - 1)).to(torch.uint8).movedim(-1, axis)


def pack_bits(values: Tensor, bits: int, axis: int) -> Tensor:
    """Undo ``unpack_bits``: int32 words; the length of ``axis`` times ``bits`` must be a multiple of 32."""
    values = values.movedim(axis, -1).to(torch.int64)
    count = values.shape[-1]
    assert count * bits % _WORD_BITS == 0, "whole words only"
    starts = torch.arange(count, device=values.device) * bits
    index, shifts = starts // _WORD_BITS, starts % _WORD_BITS
    words = values.new_zeros(*values.shape[:-1], count * bits // _WORD_BITS + 1)
    shifted = values << shifts
    words.index_add_(-1, index, shifted & 0xFFFFFFFF)
    words.index_add_(-1, index + 1, shifted >> _WORD_BITS)
    words = words[..., :-1]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, axis)
