"""Reads each checkpoint format's tensors of one linear layer into a ``StoredWeight``. Whole layers; no ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.codes import Codes, quantize_to_spans
from kernels.scaled_rows import FLOAT8, quantize_rows_ref
from workers.checkpoint.quantization import Quantization
from workers.engine.errors import UserError
from workers.model.quantized.bit_packing import unpack_bits
from workers.model.quantized.stored_weight import (
    CodedWeight,
    DenseWeight,
    Outliers,
    ScaledWeight,
    StoredWeight,
)
from workers.model.tensor_source import TensorSource

Shape = tuple[int, int]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which 4 bits of a word hold column j of eight: AWQ interleaves them (its ``pack``: 0, 2, 4, 6, 1, 3, 5, 7)."""
_LOOKUP_GROUP = 128
"""Tables belong to rows; kernels still work by groups of columns."""


def read_weight(source: TensorSource, name: str, shape: Shape, how: Quantization | None) -> StoredWeight:
    """Read the weight of layer ``name``: as the format stores it, or in full where the layer was left out of it.

    What is quantized at load leaves the logits' projection out, as other engines do.

    Raises:
        UserError: tensors are missing or have other shapes than the model's config says.
    """
    if how is None or (how.is_online and name == "lm_head"):
        return DenseWeight(source.read(f"{name}.weight", shape))
    if how.is_online:
        return quantize_online(source.read(f"{name}.weight", shape), how)
    if how.format == "gguf":
        return source.read_blocks(f"{name}.weight", shape)
    read = {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "squeezellm": _read_squeezellm,
        "fp8": _read_scaled,
        "compressed-tensors": _read_packed if how.kind == "pack-quantized" else _read_scaled,
        "bitsandbytes": _read_bnb_int8 if how.kind == "int8" else _read_bnb_4bit,
    }[how.format]
    if not source.has(f"{name}.{how.marker}"):
        return DenseWeight(source.read(f"{name}.weight", shape))
    return read(source, name, shape, how)


def quantize_online(weight: Tensor, how: Quantization) -> StoredWeight:
    """What ``--quantization`` does to weights that are stored in full: round to nearest."""
    if how.bits == 4:
        group = how.group_size or weight.shape[1]
        if weight.shape[1] % group:
            return DenseWeight(weight)
        return CodedWeight(quantize_to_spans(weight, how.bits, group))
    values, scales = quantize_rows_ref(weight.float(), torch.int8 if how.format == "int8" else FLOAT8)
    return ScaledWeight(values, scales)


def _groups(how: Quantization, width: int, name: str) -> int:
    group = how.group_size or width
    if width % group:
        raise UserError(f"{name} has {width} columns, which groups of {group} do not divide")
    return group


def _read_awq(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    num_out, width = shape
    group = _groups(how, width, name)
    order = torch.tensor(_AWQ_ORDER)

    def unpack(words: Tensor) -> Tensor:
        """[rows, out / 8] words to [out, rows]."""
        values = unpack_bits(words, 4, 1, num_out).view(words.shape[0], -1, 8)
        return values[..., order.to(words.device)].reshape(words.shape[0], num_out).t().contiguous()

    values = unpack(source.read(f"{name}.qweight", (width, num_out // 8), torch.int32))
    scales = source.read(f"{name}.scales", (width // group, num_out), torch.float16).t()
    zeros = None
    if how.has_zeros:
        zeros = unpack(source.read(f"{name}.qzeros", (width // group, num_out // 8), torch.int32))
    return CodedWeight(Codes(values, 4, group, scales, zeros))


def _read_gptq(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    num_out, width = shape
    group, bits = _groups(how, width, name), how.bits
    words = source.read(f"{name}.qweight", (width * bits // 32, num_out), torch.int32)
    values = unpack_bits(words, bits, 0, width).t().contiguous()
    scales = source.read(f"{name}.scales", (width // group, num_out), torch.float16).t()
    words = source.read(f"{name}.qzeros", (width // group, -(-num_out * bits // 32)), torch.int32)
    zeros = unpack_bits(words, bits, 1, num_out).t().to(torch.int16)
    if how.zero_shift:
        # The first format keeps them less one in ``bits`` bits, so that 0 comes as all ones and means 2 ** bits.
        zeros = zeros + how.zero_shift
    order = None
    if source.has(f"{name}.g_idx"):
        group_of = source.read(f"{name}.g_idx", (width,), torch.int32).long()
        if not torch.equal(group_of, torch.arange(width, device=group_of.device) // group):
            order = torch.argsort(group_of, stable=True)
            sizes = torch.bincount(group_of, minlength=width // group)
            if not bool((sizes == group).all()):
                raise UserError(f"{name}: g_idx gives groups of unequal sizes, {group} was declared")
            values = values[:, order]
    return CodedWeight(Codes(values, bits, group, scales, zeros), order)


def _read_packed(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    num_out, width = shape
    group, bits = _groups(how, width, name), how.bits
    words = source.read(f"{name}.weight_packed", (num_out, -(-width * bits // 32)), torch.int32)
    values = unpack_bits(words, bits, 1, width)
    scales = source.read(f"{name}.weight_scale", (num_out, width // group))
    zeros = None
    if how.has_zeros:
        words = source.read(
            f"{name}.weight_zero_point", (-(-num_out * bits // 32), width // group), torch.int32
        )
        zeros = unpack_bits(words, bits, 0, num_out).to(torch.int16)
    order = None
    if source.has(f"{name}.weight_g_idx"):
        group_of = source.read(f"{name}.weight_g_idx", (width,), torch.int32).long()
        order = torch.argsort(group_of, stable=True)
        values = values[:, order]
    return CodedWeight(Codes(values, bits, group, scales, zeros), order)


def _read_squeezellm(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    """Source: Kim et al. 2023, arXiv:2306.07629; the layout of its ``QuantLinearLUT``."""
    num_out, width = shape
    words = source.read(f"{name}.qweight", (width // 32 * how.bits, num_out), torch.int32)
    values = unpack_bits(words, how.bits, 0, width).t().contiguous()
    table = source.read(f"{name}.lookup_table", (num_out, 1 << how.bits))
    rows, columns, added = [], [], []
    if source.has(f"{name}.rows"):
        starts = source.read(f"{name}.rows", (num_out + 1,), torch.int32).long()
        rows.append(torch.repeat_interleave(torch.arange(num_out, device=starts.device), starts.diff()))
        columns.append(source.read(f"{name}.cols", (int(starts[-1]),), torch.int32).long())
        added.append(source.read(f"{name}.vals", (int(starts[-1]),)).float())
    if source.has(f"{name}.full_rows"):
        index = source.read(f"{name}.full_row_indices", None, torch.int32).long()
        full = source.read(f"{name}.full_rows", (width, index.shape[0])).float()
        rows.append(index.repeat_interleave(width))
        columns.append(torch.arange(width, device=index.device).repeat(index.shape[0]))
        added.append(full.t().reshape(-1))
    outliers = Outliers(torch.cat(rows), torch.cat(columns), torch.cat(added)) if rows else None
    group = _LOOKUP_GROUP if width % _LOOKUP_GROUP == 0 else 32
    return CodedWeight(Codes(values, how.bits, group, None, table=table), None, outliers)


def _read_scaled(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    """FP8 and INT8 of one scale a tensor, row or (FP8 only, read back in full) block."""
    num_out, width = shape
    dtype = torch.int8 if how.kind == "int-quantized" else FLOAT8
    values = source.read(f"{name}.weight", shape, dtype)
    if how.kind == "block":
        rows, columns = how.block
        blocks = (-(-num_out // rows), -(-width // columns))
        scales = source.read(f"{name}.{how.marker}", blocks).float()
        by_row = scales.repeat_interleave(rows, 0)[:num_out].repeat_interleave(columns, 1)[:, :width]
        return DenseWeight(values.float() * by_row)
    scales = source.read(f"{name}.weight_scale", None).float().reshape(-1)
    if scales.numel() not in (1, num_out):
        raise UserError(f"{name}.weight_scale has {scales.numel()} values, 1 or {num_out} are supported")
    fixed = None
    if source.has(f"{name}.input_scale"):
        given = source.read(f"{name}.input_scale", None).float().reshape(-1)
        fixed = float(given.max())
    return ScaledWeight(values, scales.expand(num_out).contiguous(), fixed)


def _read_bnb_int8(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    """LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339); its full-precision outlier columns are not kept apart."""
    values = source.read(f"{name}.weight", shape, torch.int8)
    return ScaledWeight(values, source.read(f"{name}.SCB", (shape[0],)).float() / 127.0)


def _read_bnb_4bit(source: TensorSource, name: str, shape: Shape, how: Quantization) -> StoredWeight:
    """NF4 and FP4 (Dettmers et al. 2023, arXiv:2305.14314): a table for all, a scale for each block of a row."""
    num_out, width = shape
    state = json.loads(
        bytes(source.read(f"{name}.weight.quant_state.bitsandbytes__{how.kind}", None, torch.uint8).tolist())
    )
    block = int(state["blocksize"])
    if width % block:
        raise UserError(f"{name} has {width} columns, which blocks of {block} do not divide")
    packed = source.read(f"{name}.weight", (num_out * width // 2, 1), torch.uint8).view(num_out, width // 2)
    values = torch.stack((packed >> 4, packed & 15), dim=-1).view(num_out, width)
    scales = source.read(f"{name}.weight.absmax", None)
    if source.has(f"{name}.weight.nested_absmax"):
        nested = source.read(f"{name}.weight.nested_absmax", None).float()
        steps = source.read(f"{name}.weight.nested_quant_map", None).float()
        size = int(state["nested_blocksize"])
        coarse = nested.repeat_interleave(size)[: scales.numel()]
        scales = steps[scales.long()] * coarse + float(state["nested_offset"])
    table = source.read(f"{name}.weight.quant_map", (16,)).float().view(1, 16)
    return CodedWeight(Codes(values, 4, block, scales.float().view(num_out, width // block), table=table))


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A piece of a rank's linear layer: which rows and columns of which stored layer."""

    name: str
    shape: Shape
    rows: range
    columns: range

    def read(self, source: TensorSource, how: Quantization | None, device: torch.device) -> StoredWeight:
        """Read the whole and cut it."""
        whole = read_weight(_OnDevice(source, device), self.name, self.shape, how)
        if self.rows == range(self.shape[0]) and self.columns == range(self.shape[1]):
            return whole
        return whole.take(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A source whose tensors are moved to where they are unpacked."""

    source: TensorSource
    device: torch.device

    def read(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Tensor:
        return self.source.read(name, shape, dtype).to(self.device)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def read_blocks(self, name: str, shape: Shape) -> StoredWeight:
        weight = self.source.read_blocks(name, shape)
        if isinstance(weight, DenseWeight):
            return DenseWeight(weight.values.to(self.device))
        assert isinstance(weight, CodedWeight)
        codes = weight.codes

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        moved = replace(
            codes,
            values=codes.values.to(self.device),
            scales=move(codes.scales),
            zeros=move(codes.zeros),
            offsets=move(codes.offsets),
        )
        return replace(weight, codes=moved)
