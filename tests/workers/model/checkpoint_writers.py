"""Writes a linear layer in each tool's checkpoint layout, word for word, and says what it stands for.

The loops are slow and literal on purpose: they share nothing with the readers that they test.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors by the last part of their names, and the dense weight [out, in] that they stand for."""
GROUP = 32


def round_to_codes(weight: Tensor, bits: int, group: int, is_symmetric: bool = False) -> tuple[Tensor, ...]:
    """Codes [out, in], scales and zeros [out, groups], and the dense weight."""
    num_out, width = weight.shape
    groups = weight.view(num_out, -1, group)
    top = 2**bits - 1
    if is_symmetric:
        scales = groups.abs().amax(-1) / (top // 2)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        scales = (groups.amax(-1) - groups.amin(-1)) / top
        zeros = (-groups.amin(-1) / scales).round().clamp(1, top)
    scales = scales.half().float()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    dense = ((codes - zeros[..., None]) * scales[..., None]).view(num_out, width)
    return codes.view(num_out, width).int(), scales, zeros.int(), dense


def pack_words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, count] integers to [rows, words] int32, ``order`` saying which value comes at which place of a word."""
    per_word = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(per_word):
            index = place if order is None else order[place]
            words[:, word] |= values[:, word * per_word + index].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def pack_three_bits(values: Tensor) -> Tensor:
    """[in, out] to [in * 3 / 32, out]: GPTQ's and SqueezeLLM's three words of 32 values."""
    words = []
    for start in range(0, values.shape[0], 32):
        v = values[start : start + 32].long()
        first = sum(v[j] << (3 * j) for j in range(10)) | (v[10] & 3) << 30
        second = v[10] >> 2 | sum(v[11 + j] << (3 * j + 1) for j in range(10)) | (v[21] & 1) << 31
        third = v[21] >> 1 | sum(v[22 + j] << (3 * j + 2) for j in range(10))
        words += [first, second, third]
    packed = torch.stack(words)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def awq(weight: Tensor) -> Written:
    """AutoAWQ's WQLinear_GEMM."""
    codes, scales, zeros, dense = round_to_codes(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": pack_words(codes.t(), 4, order),
        "qzeros": pack_words(zeros.t(), 4, order),
        "scales": scales.t().half().contiguous(),
    }, dense


def gptq(
    weight: Tensor, bits: int = 4, is_symmetric: bool = False, has_order: bool = False, version: int = 1
) -> Written:
    """AutoGPTQ's QuantLinear; with ``has_order`` columns are sorted into groups by importance (desc_act)."""
    width = weight.shape[1]
    order = torch.randperm(width) if has_order else torch.arange(width)
    codes, scales, zeros, sorted_dense = round_to_codes(weight[:, order], bits, GROUP, is_symmetric)
    dense, in_place = torch.empty_like(weight), torch.empty_like(codes)
    dense[:, order], in_place[:, order] = sorted_dense, codes
    group_of = torch.empty(width, dtype=torch.int32)
    group_of[order] = torch.arange(width, dtype=torch.int32) // GROUP
    stored_zeros = (zeros - int(version == 1)) & (2**bits - 1)
    if bits == 3:
        words, zero_words = pack_three_bits(in_place.t()), pack_three_bits(stored_zeros).t().contiguous()
    else:
        words, zero_words = pack_words(in_place, bits).t().contiguous(), pack_words(stored_zeros.t(), bits)
    return {"qweight": words, "qzeros": zero_words, "scales": scales.t().half(), "g_idx": group_of}, dense


def fp8(weight: Tensor, is_by_row: bool = False, input_scale: float | None = None) -> Written:
    """AutoFP8 (one scale) and compressed-tensors (one a row)."""
    largest = weight.abs().amax(1, keepdim=True) if is_by_row else weight.abs().max()
    scale = (largest / 448.0).float()
    values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale}
    if input_scale is not None:
        tensors["input_scale"] = torch.tensor(input_scale)
    return tensors, values.float() * scale


def int8(weight: Tensor) -> Written:
    """compressed-tensors' int-quantized."""
    scale = weight.abs().amax(1, keepdim=True) / 127.0
    values = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def packed(weight: Tensor, bits: int = 4, is_symmetric: bool = True) -> Written:
    """compressed-tensors' pack-quantized: codes from 0, along the inner axis; zero points along the outer."""
    codes, scales, zeros, dense = round_to_codes(weight, bits, GROUP, is_symmetric)
    tensors = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = pack_words(zeros.t(), bits).t().contiguous()
    return tensors, dense


def squeezellm(weight: Tensor, bits: int = 4, has_outliers: bool = True) -> Written:
    """SqueezeLLM's QuantLinearLUT with a table a row, a sparse part and two full rows."""
    num_out, width = weight.shape
    table = torch.sort(torch.randn(num_out, 2**bits) * weight.std(), dim=1).values
    codes = (weight[:, :, None] - table[:, None, :]).abs().argmin(-1).int()
    dense = table.gather(1, codes.long())
    words = pack_three_bits(codes.t()) if bits == 3 else pack_words(codes, bits).t().contiguous()
    tensors = {"qweight": words, "lookup_table": table}
    if has_outliers:
        sparse = torch.where(torch.rand(num_out, width) < 0.02, torch.randn(num_out, width), 0.0)
        rows = sparse.to_sparse_csr()
        full, index = torch.randn(width, 2) * 0.1, torch.tensor([1, num_out - 2], dtype=torch.int32)
        tensors |= {
            "rows": rows.crow_indices().int(),
            "cols": rows.col_indices().int(),
            "vals": rows.values(),
            "full_rows": full,
            "full_row_indices": index,
        }
        dense = dense + sparse
        dense[index.long()] += full.t()
    return tensors, dense


def nf4(weight: Tensor, is_nested: bool = True) -> Written:
    """bitsandbytes' Params4bit: blocks of 64, two codes a byte, the first one in the high half."""
    num_out, width = weight.shape
    table = torch.cat((torch.linspace(-1, 0, 8), torch.linspace(0, 1, 9)[1:]))
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [num_out, width]}
    nested = {}
    if is_nested:
        offset, steps = scales.mean(), torch.linspace(-1, 1, 256)
        coarse = (scales - offset).view(-1, 4).abs().amax(1)
        index = ((scales - offset) / coarse.repeat_interleave(4))[:, None].sub(steps).abs().argmin(1)
        scales = steps[index] * coarse.repeat_interleave(4) + offset
        nested = {"weight.nested_absmax": coarse, "weight.nested_quant_map": steps}
        state |= {"nested_blocksize": 4, "nested_offset": float(offset)}
    codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1)
    dense = (table[codes] * scales[:, None]).view(num_out, width)
    flat = codes.view(-1, 2)
    tensors = {
        "weight": (flat[:, 0] << 4 | flat[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": index.to(torch.uint8) if is_nested else scales,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors | nested, dense


def bnb_int8(weight: Tensor) -> Written:
    """bitsandbytes' Int8Params."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": values, "SCB": largest}, values.float() * largest[:, None] / 127


def fp8_blocks(weight: Tensor, scale_name: str) -> Written:
    """Blocks of 48 rows and 32 columns, those at the edges smaller, that share a scale: DeepSeek's layout."""
    rows, columns = FP8_BLOCK
    num_out, width = weight.shape
    scales = torch.zeros(-(-num_out // rows), -(-width // columns))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    stored = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[i, j]).to(values.dtype)
            stored[place] = values[place].float() * scales[i, j]
    return {"weight": values, scale_name: scales}, stored


def compressed(kind: str, strategy: str, bits: int = 8, **weights: object) -> dict[str, object]:
    """The quantization_config of compressed-tensors."""
    number = "float" if kind == "float-quantized" else "int"
    about = {"num_bits": bits, "type": number, "strategy": strategy, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": about, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FP8_BLOCK = (48, 32)


def _gptq_config(bits: int = 4, version: str = "gptq", **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version, **more}


WEIGHT_ONLY: dict[str, tuple[dict[str, object], Callable[[Tensor], Written]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": (_gptq_config(), gptq),
    "gptq symmetric": (_gptq_config(sym=True), lambda w: gptq(w, is_symmetric=True)),
    "gptq desc_act": (_gptq_config(desc_act=True), lambda w: gptq(w, has_order=True)),
    "gptq v2": (_gptq_config(version="gptq_v2"), lambda w: gptq(w, version=2)),
    "gptq 8 bits": (_gptq_config(8), lambda w: gptq(w, 8)),
    "gptq 3 bits": (_gptq_config(3), lambda w: gptq(w, 3)),
    "squeezellm": ({"quant_method": "squeezellm", "wbits": 4}, squeezellm),
    "squeezellm 3 bits": ({"quant_method": "squeezellm", "wbits": 3}, lambda w: squeezellm(w, 3)),
    "squeezellm dense": (
        {"quant_method": "squeezellm", "wbits": 4},
        lambda w: squeezellm(w, has_outliers=False),
    ),
    "packed": (compressed("pack-quantized", "group", 4, group_size=GROUP), packed),
    "packed zeros": (
        compressed("pack-quantized", "group", 4, group_size=GROUP, symmetric=False),
        lambda w: packed(w, is_symmetric=False),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(FP8_BLOCK)},
        lambda w: fp8_blocks(w, "weight_scale_inv"),
    ),
    "compressed fp8 blocks": (
        compressed("float-quantized", "block", block_structure=list(FP8_BLOCK)),
        lambda w: fp8_blocks(w, "weight_scale"),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "nf4 plain": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda w: nf4(w, is_nested=False),
    ),
}
"""Formats whose activations stay as they are: config, writer."""
SCALED: dict[str, tuple[dict[str, object], Callable[[Tensor], Written]]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8(w, input_scale=0.01),
    ),
    "compressed fp8": (compressed("float-quantized", "channel"), lambda w: fp8(w, is_by_row=True)),
    "compressed int8": (compressed("int-quantized", "channel"), int8),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
}
"""Formats that round activations, too."""
