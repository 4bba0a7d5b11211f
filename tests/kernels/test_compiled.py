"""Norms, products, sums and copies compile for sm_80 and sm_90 without a GPU: no register spills, wide loads."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from kernels import (
    all_reduce,
    block_copy,
    few_rows,
    gemv,
    rms_norm,
    silu_mul,
)


@pytest.mark.parametrize(("has_other", "has_residual"), [(False, False), (False, True), (True, True)])
def test_rms_norm_keeps_its_registers(
    compiling: ModuleType, architecture: int, has_other: bool, has_residual: bool, tmp_path: Path
) -> None:
    compiled = compiling.compile_kernel(
        rms_norm._rms_norm_kernel,
        architecture,
        dict.fromkeys(("x_ptr", "other_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
        | {"eps": "fp32"},
        {
            "HAS_OTHER": has_other,
            "HAS_RESIDUAL": has_residual,
            "BLOCK": 4096,
            "PDL": architecture == 90,
        },
        num_warps=8,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0


def test_silu_mul_keeps_its_registers(compiling: ModuleType, architecture: int, tmp_path: Path) -> None:
    compiled = compiling.compile_kernel(
        silu_mul._silu_mul_kernel,
        architecture,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        {"BLOCK": 1024, "IS_GELU": False, "PDL": architecture == 90},
        num_warps=4,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize(("has_norm", "is_gated", "has_residual"), [(1, 0, 0), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("width", [576, 4096])
def test_gemv_keeps_its_registers(
    compiling: ModuleType,
    architecture: int,
    has_norm: bool,
    is_gated: bool,
    has_residual: bool,
    width: int,
    tmp_path: Path,
) -> None:
    step, rows, num_warps = gemv.gemv_tiles(width, bool(is_gated), bool(has_residual))

    compiled = compiling.compile_kernel(
        gemv._gemv_kernel,
        architecture,
        dict.fromkeys(("x_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr"), "*bf16")
        | {"eps": "fp32"},
        {
            "WIDTH": width,
            "NUM_OUT": 4096,
            "ROWS": rows,
            "STEP": step,
            "HAS_NORM": bool(has_norm),
            "HAS_BIAS": False,
            "HAS_RESIDUAL": bool(has_residual),
            "IS_GATED": bool(is_gated),
            "IS_EVEN": width % step == 0,
            "PDL": architecture == 90,
        },
        num_warps=num_warps,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    if width % step == 0:
        assert "ld.global.L1::evict_first.v4" in compiled.asm["ptx"] or "v4.b32" in compiled.asm["ptx"]
    if architecture == 90:  # weights are asked for while the kernel ahead still runs
        ahead = compiled.asm["ptx"].partition("griddepcontrol.wait")[0]
        assert "ld.global" in ahead


@pytest.mark.parametrize("num_rows", [16, 32, 64])
@pytest.mark.parametrize("kind", ["parts", "whole", "short", "gated", "short gated"])
def test_products_of_few_rows_keep_their_registers(
    compiling: ModuleType, architecture: int, num_rows: int, kind: str, tmp_path: Path
) -> None:
    tiles = {
        "parts": few_rows.parts_tiles(4096, 14336, num_rows),
        "whole": few_rows.whole_tiles(128256, num_rows),
        "short": few_rows.whole_tiles(7168, num_rows),
        "gated": few_rows.gated_tiles(14336),
        "short gated": few_rows.gated_tiles(7168),
    }[kind]
    is_gated = kind.endswith("gated")
    # A GPU with less memory a program has fewer tiles in flight; the last bytes are for barriers.
    stage_bytes = 2 * tiles.columns * (tiles.weight_rows + num_rows)
    num_stages = min(tiles.num_stages, compiling.SHARED_MEMORY_BYTES[architecture] // stage_bytes)

    compiled = compiling.compile_kernel(
        few_rows._few_rows_kernel,
        architecture,
        {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*fp32" if kind == "parts" else "*bf16"},
        {
            "NUM_OUT": 4096,
            "WIDTH": 14336,
            "ROWS": num_rows,
            "WEIGHT_ROWS": tiles.weight_rows // (2 if is_gated else 1),
            "COLUMNS": tiles.columns,
            "PARTS": tiles.parts,
            "IS_GATED": is_gated,
            "PDL": architecture == 90,
        },
        tiles.num_warps,
        num_stages,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= compiling.SHARED_MEMORY_BYTES[architecture]


@pytest.mark.parametrize("is_flagged", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_parts"), [(8, 0), (2, 2)])
def test_sums_over_ranks_write_16_bytes_at_once_and_order_what_is_read(
    compiling: ModuleType, architecture: int, is_flagged: bool, num_ranks: int, num_parts: int, tmp_path: Path
) -> None:
    block = 4096

    compiled = compiling.compile_kernel(
        all_reduce._reduce_kernel,
        architecture,
        dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
        | {"x_ptr": "*fp32" if num_parts else "*bf16"}
        | {"own_ptr": "*u8", "addresses_ptr": "*i64", "turns_ptr": "*i32", "eps": "fp32"},
        {
            "WIDTH": block,
            "MAX_ROWS": 256,
            "RANK": 1,
            "NUM_RANKS": num_ranks,
            "FLAG_OFFSET": 1 << 20,
            "IS_FLAGGED": is_flagged,
            "IS_WIDE": False,
            "PARTS": num_parts,
            "HAS_RESIDUAL": True,
            "HAS_NORM": True,
            "BLOCK": block,
            "PDL": architecture == 90,
        },
        num_warps=all_reduce.reduce_warps(block),
    )

    ptx = compiled.asm["ptx"]
    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert "st.global.v4.b32" in ptx
    assert "ld.volatile.global.v4.b32" in ptx
    # Without flags beside the elements a fence stands between a row and the number that announces it.
    assert ("atom.global.sys.release" in ptx) is not is_flagged
    assert ("ld.global.sys.acquire" in ptx) is not is_flagged


def test_block_copy_moves_sixteen_bytes_at_a_time(
    compiling: ModuleType, architecture: int, tmp_path: Path
) -> None:
    compiled = compiling.compile_kernel(
        block_copy._copy_blocks_kernel,
        architecture,
        {"source": "*i64", "target": "*i64", "pairs": "*i32"},
        {"CHUNK": block_copy._CHUNK},
        num_warps=block_copy._NUM_WARPS,
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0
    assert re.search(r"ld\.global\S*\.v2\.b64|cp\.async", compiled.asm["ptx"])
