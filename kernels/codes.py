"""Weights as small integer codes with a scale for each group: what they mean, and how a device keeps them.

One meaning covers AWQ, GPTQ, GGUF's blocks, NF4 and SqueezeLLM: ``weight = scale * (code - zero) + offset``, or
``weight = scale * table[code]``, where scale, zero and offset belong to a group of consecutive columns of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_GROUP = 128
"""Larger groups are kept as several of this size with equal scales: a kernel holds whole groups."""
MIN_GROUP = 16
"""The shortest product of tensor cores."""
_LEAST_NORMAL_HALF = 2.0**-14


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [out, in] as codes, one byte each: the form in which formats are read, cut and joined."""

    values: Tensor
    """[out, in] uint8, less than ``2 ** bits``."""
    bits: int
    group: int
    """Divides the number of columns."""
    scales: Tensor | None
    """[out, in / group] floating; None: 1, with a table only."""
    zeros: Tensor | None = None
    """[out, in / group] integers; None: the middle of the codes' range, or 0 with offsets or a table."""
    offsets: Tensor | None = None
    """[out, in / group] floating, added after scaling; None: none."""
    table: Tensor | None = None
    """[out or 1, 2 ** bits] floating: what codes stand for; None: themselves."""

    @property
    def shape(self) -> tuple[int, int]:
        """Out and in."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def middle(self) -> int:
        """The zero point where none is given."""
        return 0 if self.offsets is not None or self.table is not None else 1 << (self.bits - 1)

    def take_rows(self, rows: range) -> Codes:
        """Return some rows."""
        return self._map_rows(lambda tensor: tensor[rows.start : rows.stop])

    def reorder_rows(self, order: Tensor) -> Codes:
        """Return row ``order[i]`` as row i."""
        return self._map_rows(lambda tensor: tensor[order])

    def take_columns(self, columns: range) -> Codes:
        """Return some columns; groups become smaller where the range cuts one."""
        group = math.gcd(self.group, math.gcd(columns.start, len(columns)))
        finer = self.regroup(group)
        groups = slice(columns.start // group, columns.stop // group)

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:, groups]

        return replace(
            finer,
            values=finer.values[:, columns.start : columns.stop],
            scales=cut(finer.scales),
            zeros=cut(finer.zeros),
            offsets=cut(finer.offsets),
        )

    def regroup(self, group: int) -> Codes:
        """Return the same weights with smaller groups; ``group`` divides the present one."""
        times = self.group // group

        def repeat(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.repeat_interleave(times, dim=1)

        if times == 1:
            return self
        return replace(
            self,
            group=group,
            scales=repeat(self.scales),
            zeros=repeat(self.zeros),
            offsets=repeat(self.offsets),
        )

    def stack(self, other: Codes) -> Codes | None:
        """Return ``other`` below this one, or None where the two are not of one kind."""
        if (self.bits, self.group, self.shape[1]) != (other.bits, other.group, other.shape[1]):
            return None
        joined: dict[str, Tensor | None] = {}
        for name in ("values", "scales", "zeros", "offsets", "table"):
            first, second = getattr(self, name), getattr(other, name)
            if (first is None) != (second is None):
                return None
            if name == "table" and first is not None and first.shape[0] == 1:
                if not torch.equal(first, second):
                    return None
                joined[name] = first
            else:
                joined[name] = None if first is None else torch.cat((first, second))
        return replace(self, **joined)  # type: ignore[arg-type]

    def _map_rows(self, change: object) -> Codes:
        assert callable(change)

        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        is_shared = self.table is None or self.table.shape[0] == 1
        return replace(
            self,
            values=change(self.values),
            scales=apply(self.scales),
            zeros=apply(self.zeros),
            offsets=apply(self.offsets),
            table=self.table if is_shared else apply(self.table),
        )


def dequantize_ref(codes: Codes) -> Tensor:
    """Say what the codes stand for: [out, in] float32."""
    num_rows, width = codes.shape
    grouped = (num_rows, width // codes.group, codes.group)
    if codes.table is not None:
        table = codes.table.float().expand(num_rows, -1)
        weights = table.gather(1, codes.values.long()).view(grouped)
    else:
        zeros = codes.middle if codes.zeros is None else codes.zeros.to(torch.int16)[..., None]
        weights = (codes.values.to(torch.int16).view(grouped) - zeros).float()
    if codes.scales is not None:
        weights = weights * codes.scales.float()[..., None]
    if codes.offsets is not None:
        weights = weights + codes.offsets.float()[..., None]
    return weights.reshape(num_rows, width)


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Codes as kernels read them: two 4-bit codes a byte, or one of up to 8 bits; groups are the outer axis of scales.

    A byte of 4-bit codes holds column j of an even group (low half) and column j of the group after it (high half), so
    that unpacking moves nothing between threads. An odd last group is followed by one of zeros.
    """

    codes: Tensor
    """[out, bytes] uint8."""
    scales: Tensor | None
    """[groups, out]."""
    zeros: Tensor | None
    """[groups, out] uint8 or int16."""
    offsets: Tensor | None
    """[groups, out]."""
    table: Tensor | None
    """[out or 1, 16 or 2 ** bits] in the activations' dtype."""
    group: int
    middle: int
    is_4bit: bool
    num_out: int
    width: int
    """Columns, without padding."""

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        tensors = (self.codes, self.scales, self.zeros, self.offsets, self.table)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def can_pack(codes: Codes) -> bool:
    """True if kernels take such groups; others must be multiplied as plain numbers."""
    return math.gcd(codes.group, MAX_GROUP) >= MIN_GROUP


def pack_codes(codes: Codes, dtype: torch.dtype) -> PackedCodes:
    """Bring codes into the kernels' layout, for activations of ``dtype``.

    Raises:
        ValueError: groups are no multiple of 16 columns.
    """
    if not can_pack(codes):
        raise ValueError(f"groups of {codes.group} columns: a multiple of {MIN_GROUP} is needed")
    codes = codes.regroup(math.gcd(codes.group, MAX_GROUP))
    num_out, width = codes.shape
    num_groups = width // codes.group
    is_4bit = codes.bits <= 4
    padding = num_groups % 2 if is_4bit else 0
    values = torch.nn.functional.pad(codes.values, (0, padding * codes.group))
    if is_4bit:
        pairs = values.view(num_out, -1, 2, codes.group)
        values = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(num_out, -1)

    def lay(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.nn.functional.pad(tensor, (0, padding)).t().contiguous()

    table = codes.table
    if table is not None:
        table = table.to(dtype)
        if is_4bit:
            table = torch.nn.functional.pad(table, (0, 16 - table.shape[1]))
        table = table.contiguous()
    zeros = codes.zeros
    if zeros is not None:
        zeros = zeros.to(torch.uint8 if codes.bits <= 4 else torch.int16)
    return PackedCodes(
        codes=values.contiguous(),
        scales=lay(_shorten(codes.scales, dtype)),
        zeros=lay(zeros),
        offsets=lay(_shorten(codes.offsets, dtype)),
        table=table,
        group=codes.group,
        middle=codes.middle,
        is_4bit=is_4bit,
        num_out=num_out,
        width=width,
    )


def unpack_codes(packed: PackedCodes) -> Codes:
    """Undo ``pack_codes``."""
    values = packed.codes
    if packed.is_4bit:
        pairs = values.view(packed.num_out, -1, 1, packed.group)
        values = torch.cat((pairs & 15, pairs >> 4), dim=2).view(packed.num_out, -1)[:, : packed.width]
    num_groups = packed.width // packed.group

    def back(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:num_groups].t()

    zeros = back(packed.zeros)
    if zeros is None and packed.middle and packed.offsets is None:
        zeros = torch.full((packed.num_out, num_groups), packed.middle, device=values.device)
    bits = 4 if packed.is_4bit else 8
    return Codes(values, bits, packed.group, back(packed.scales), zeros, back(packed.offsets), packed.table)


def quantize_to_codes(weight: Tensor, bits: int, group: int) -> Codes:
    """Round each group of ``weight`` [out, in] to codes between its smallest and largest value, 0 being exact."""
    num_out, width = weight.shape
    groups = weight.float().view(num_out, width // group, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    top = (1 << bits) - 1
    scales = ((high - low) / top).clamp(min=1e-10)
    zeros = (-low / scales).round().clamp(0, top)
    values = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    values = values.to(torch.uint8).view(num_out, width)
    return Codes(values, bits, group, scales, zeros.to(torch.int16))


def quantize_to_spans(weight: Tensor, bits: int, group: int) -> Codes:
    """Round each group of ``weight`` [out, in] to codes whose ends are its smallest and largest value, as Q4_1 does.

    An offset costs a byte more than a zero point, but no step is lost on 0 and the grid is not moved by up to half a
    step, which is an error that all columns of a group share.
    """
    num_out, width = weight.shape
    groups = weight.float().view(num_out, width // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    top = (1 << bits) - 1
    scales = ((high - low) / top).clamp(min=1e-10)
    values = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, top)
    return Codes(values.to(torch.uint8).view(num_out, width), bits, group, scales, offsets=low)


def _shorten(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """In float16 where activations are no more exact than it, and no scale is too small for it."""
    if tensor is None or dtype == torch.float32:
        return None if tensor is None else tensor.float()
    if tensor.dtype == torch.float16:
        return tensor
    sizes = tensor.float().abs()
    is_normal = (sizes == 0) | ((sizes >= _LEAST_NORMAL_HALF) & (sizes <= torch.finfo(torch.float16).max))
    return tensor.to(torch.float16) if bool(is_normal.all()) else tensor.float()
