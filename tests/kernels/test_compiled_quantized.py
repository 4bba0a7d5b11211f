"""The kernels of quantized weights and experts compile without a GPU: no register spills, few instructions a code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from kernels import (
    coded_linear,
    decode_attention_work,
    experts,
    nibble_linear,
    outliers,
    rope_kv_write,
    scaled_linear,
    scaled_rows,
)
from kernels.splits import ProductTiles

OUT, WIDTH = 4096, 4096


def cut(tiles: ProductTiles, length: int) -> dict[str, object]:
    """The constants of an inner axis cut into parts."""
    share, splits = tiles.cut(length)
    return {"PER_SPLIT": share, "IS_SPLIT": splits > 1, "ROWS": tiles.rows, "TOKENS": tiles.tokens}


CODE_POINTERS = {"codes_ptr": "*u8", "scales_ptr": "*fp16", "zeros_ptr": "*u8", "offsets_ptr": "*fp16"}


@pytest.mark.parametrize("num_tokens", [1, 32, 64])
@pytest.mark.parametrize(("group", "has_offsets"), [(128, False), (32, True)])
def test_nibbles_are_operands_as_they_are(
    compiling: ModuleType, num_tokens: int, group: int, has_offsets: bool, tmp_path: Path
) -> None:
    tiles = nibble_linear.nibble_tiles(num_tokens, OUT, WIDTH, group)
    num_steps = WIDTH // (2 * group)
    compiled = compiling.compile_kernel(
        nibble_linear._nibble_linear_kernel,
        90,
        CODE_POINTERS
        | dict.fromkeys(("high_ptr", "low_ptr"), "*fp8e4nv")
        | dict.fromkeys(("x_scales_ptr", "sums_ptr", "out_ptr"), "*fp32")
        | {"bias_ptr": "*bf16"},
        cut(tiles, num_steps)
        | {
            "NUM_OUT": OUT,
            "WIDTH": WIDTH,
            "ROW_BYTES": WIDTH // 2,
            "GROUP": group,
            "MIDDLE": 0 if has_offsets else 8,
            "HAS_ZEROS": not has_offsets,
            "HAS_OFFSETS": has_offsets,
            "HAS_BIAS": False,
            "NUM_STEPS": num_steps,
            "UNROLL": tiles.step,
            "CHUNK": nibble_linear._CHUNK,
            "IS_PACKED": True,
            "PDL": True,
        },
        tiles.num_warps,
        tiles.num_stages,
    )

    ptx = compiled.asm["ptx"]
    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert "wgmma" in ptx
    # One "and" takes four codes apart; byte by byte it were sixty-four for each thread of this tile.
    assert len(re.findall(r"and\.b32\s+\S+, \S+, 0x0F0F0F0F", ptx)) >= 8
    assert len(re.findall(r"and\.b16\s+\S+, \S+, 15", ptx)) == 0


def codes_of(is_4bit: bool, has_table: bool) -> dict[str, int | bool]:
    """Constants of a weight of such codes in groups of 128."""
    return {
        "NUM_OUT": OUT,
        "WIDTH": WIDTH,
        "ROW_BYTES": WIDTH // (2 if is_4bit else 1),
        "GROUP": 128,
        "IS_4BIT": is_4bit,
        "MIDDLE": 0 if has_table else 8,
        "HAS_SCALES": not has_table,
        "HAS_ZEROS": not has_table,
        "HAS_OFFSETS": False,
        "HAS_TABLE": has_table,
        "TABLE_ROW": 16 if has_table else 0,
    }


@pytest.mark.parametrize("num_tokens", [1, 64, 128])
@pytest.mark.parametrize(("is_4bit", "has_table"), [(True, False), (True, True), (False, False)])
def test_codes_of_all_kinds_keep_their_registers(
    compiling: ModuleType, architecture: int, num_tokens: int, is_4bit: bool, has_table: bool, tmp_path: Path
) -> None:
    tiles = coded_linear.coded_tiles(num_tokens, OUT, WIDTH, 128)
    num_steps = WIDTH // (256 if is_4bit else 128)
    compiled = compiling.compile_kernel(
        coded_linear._coded_linear_kernel,
        architecture,
        CODE_POINTERS
        | dict.fromkeys(("x_ptr", "table_ptr", "bias_ptr"), "*bf16")
        | {"out_ptr": "*fp32", "zeros_ptr": "*u8" if is_4bit else "*i16"},
        cut(tiles, num_steps)
        | {
            **codes_of(is_4bit, has_table),
            "HAS_BIAS": False,
            "NUM_STEPS": num_steps,
            "UNROLL": tiles.step,
            "PDL": architecture == 90,
        },
        tiles.num_warps,
        tiles.num_stages,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= compiling.SHARED_MEMORY_BYTES[architecture]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("is_4bit", "has_table"), [(True, True), (True, False), (False, False)])
def test_codes_become_plain_numbers_of_any_dtype(
    compiling: ModuleType, dtype: str, is_4bit: bool, has_table: bool, tmp_path: Path
) -> None:
    compiled = compiling.compile_kernel(
        coded_linear._unpack_kernel,
        90,
        CODE_POINTERS
        | dict.fromkeys(("table_ptr", "out_ptr"), f"*{dtype}")
        | {"zeros_ptr": "*u8" if is_4bit else "*i16"},
        {
            **codes_of(is_4bit, has_table),
            "ROWS": coded_linear._UNPACK_BYTES // 128,
            "PDL": True,
        },
        num_warps=4,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 32, 64, 256])
def test_products_of_8_bits_keep_their_registers(
    compiling: ModuleType, num_tokens: int, is_int8: bool, tmp_path: Path
) -> None:
    tiles = scaled_linear.scaled_tiles(num_tokens, OUT, WIDTH)
    kind = "*i8" if is_int8 else "*fp8e4nv"
    compiled = compiling.compile_kernel(
        scaled_linear._scaled_linear_kernel,
        90,
        {"x_ptr": kind, "weight_ptr": kind, "bias_ptr": "*bf16"}
        | dict.fromkeys(("x_scales_ptr", "scales_ptr", "out_ptr"), "*fp32"),
        cut(tiles, WIDTH)
        | {
            "NUM_OUT": OUT,
            "WIDTH": WIDTH,
            "HAS_BIAS": False,
            "IS_INT8": is_int8,
            "STEP": tiles.step,
            "PDL": True,
        },
        tiles.num_warps,
        tiles.num_stages,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize("num_pairs", [16, 256, 4096])
def test_experts_keep_their_registers(
    compiling: ModuleType, architecture: int, num_pairs: int, tmp_path: Path
) -> None:
    rows, tile, step, num_warps, num_stages = experts.expert_tiles(num_pairs, 8)
    compiled = compiling.compile_kernel(
        experts._expert_linear_kernel,
        architecture,
        dict.fromkeys(("x_ptr", "weights_ptr", "out_ptr"), "*bf16")
        | {"pairs_ptr": "*i64", "starts_ptr": "*i32", "pair_weights_ptr": "*fp32"},
        {
            "NUM_EXPERTS": 8,
            "NUM_OUT": OUT,
            "WIDTH": WIDTH,
            "TOP_K": 2,
            "IS_SPREAD": True,
            "ROWS": rows,
            "TILE": tile,
            "STEP": step,
            "PDL": architecture == 90,
        },
        num_warps,
        num_stages,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= compiling.SHARED_MEMORY_BYTES[architecture]


@pytest.mark.parametrize("has_sums", [True, False])
def test_rows_and_outliers_keep_their_registers(
    compiling: ModuleType, has_sums: bool, tmp_path: Path
) -> None:
    rows = compiling.compile_kernel(
        scaled_rows._scaled_rows_kernel,
        90,
        dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr"), "*bf16")
        | dict.fromkeys(("values_ptr", "low_ptr"), "*fp8e4nv")
        | dict.fromkeys(("scales_ptr", "sums_ptr"), "*fp32")
        | {"eps": "fp32", "fixed_scale": "fp32"},
        {
            "WIDTH": 14336,
            "LARGEST": 448.0,
            "LEAST_SCALE": 1e-12,
            "IS_INT8": False,
            "IS_GATED": True,
            "HAS_NORM": False,
            "HAS_RESIDUAL": False,
            "IS_FIXED": False,
            "SUM_GROUP": 128 if has_sums else 0,
            "BLOCK": 16384,
            "PDL": True,
        },
        num_warps=16,
    )
    sparse = compiling.compile_kernel(
        outliers._add_sparse_kernel,
        90,
        dict.fromkeys(("x_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("starts_ptr", "columns_ptr"), "*i32")
        | {"values_ptr": "*fp32"},
        {"NUM_OUT": OUT, "WIDTH": WIDTH, "ROWS": outliers._ROWS, "TOKENS": outliers._TOKENS},
        num_warps=4,
    )

    assert compiling.spilled_bytes(rows, tmp_path) == compiling.spilled_bytes(sparse, tmp_path) == 0


def test_a_cache_of_e4m3_is_written_without_spills(compiling: ModuleType, tmp_path: Path) -> None:
    compiled = compiling.compile_kernel(
        rope_kv_write._rope_kv_write_kernel,
        90,
        dict.fromkeys(("qkv_ptr", "q_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16")
        | {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_sin_ptr": "*fp32", "kv_cache_ptr": "*fp8e4nv"}
        | dict.fromkeys(("eps", "k_inverse", "v_inverse"), "fp32"),
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": 128,
            "HALF_PADDED": 64,
            "HEADS": rope_kv_write.HEADS,
            "HAS_NORM": False,
            "MOST": rope_kv_write.MAX_FLOAT8,
            "PDL": True,
        },
        num_warps=2,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert "e4m3x2" in compiled.asm["ptx"]


def test_a_cache_of_e4m3_is_read_without_spills(compiling: ModuleType, tmp_path: Path) -> None:
    launch = decode_attention_work.work_options(128, 2, is_hopper=True)
    compiled = compiling.compile_kernel(
        decode_attention_work._decode_work_kernel,
        90,
        {"q_ptr": "*bf16", "out_ptr": "*bf16", "kv_cache_ptr": "*fp8e4nv"}
        | dict.fromkeys(
            ("block_tables_ptr", "items_ptr", "shares_ptr", "token_positions_ptr", "counters_ptr"), "*i32"
        )
        | {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"},
        {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "PDL": True, "WINDOW": 0, "SOFT_CAP": 0.0}
        | decode_attention_work.work_constants(128, 4, launch["num_warps"]),
        **launch,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
