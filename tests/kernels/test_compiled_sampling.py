"""The kernels that choose tokens compile for sm_80 and sm_90 without a GPU: no register spills."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from kernels import (
    draw,
    filters,
    log_sum_exp,
    token_mask,
    top_tokens,
)


def test_masks_keep_their_registers(compiling: ModuleType, architecture: int, tmp_path: Path) -> None:
    types = {"logits_ptr": "*bf16", "allowed_ptr": "*u8"}

    compiled = compiling.compile_kernel(
        token_mask._forbid_kernel, architecture, types, {"BLOCK": token_mask._BLOCK}, num_warps=4
    )

    assert compiling.spilled_bytes(compiled, tmp_path) == 0


def test_log_probabilities_keep_their_registers(
    compiling: ModuleType, architecture: int, tmp_path: Path
) -> None:
    sums = compiling.compile_kernel(
        log_sum_exp._log_sum_exp_kernel,
        architecture,
        {"x_ptr": "*fp32", "out_ptr": "*fp32"},
        {"BLOCK": log_sum_exp._BLOCK},
        num_warps=8,
    )
    tops = compiling.compile_kernel(
        top_tokens._top_tokens_kernel,
        architecture,
        {"logits_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i64"},
        {"BLOCK": top_tokens._BLOCK},
        num_warps=16,
    )

    assert compiling.spilled_bytes(sums, tmp_path) == compiling.spilled_bytes(tops, tmp_path) == 0


def test_the_draw_keeps_its_registers(compiling: ModuleType, architecture: int, tmp_path: Path) -> None:
    pointers = dict.fromkeys(("num_rows_ptr", "rows_ptr", "starts_ptr", "token_ids_ptr", "drawn_ptr"), "*i32")
    types = pointers | {
        "logits_ptr": "*bf16",
        "temperatures_ptr": "*fp32",
        "floors_ptr": "*fp32",
        "scratch_ptr": "*fp64",
        "seeds_ptr": "*i64",
        "choices_ptr": "*i32",
    }
    is_hopper = architecture == 90

    sums = compiling.compile_kernel(
        draw._race_stretches_kernel,
        architecture,
        types,
        {"STRETCH": draw.STRETCH, "HEATS": draw.HEATS, "RACE": 0, "PDL": is_hopper},
        num_warps=4,
    )
    constants = {"STRETCH": draw.STRETCH, "PARTS_PADDED": 32, "RACE": 1, "NO_TOKEN": -1, "PDL": is_hopper}
    drawn = compiling.compile_kernel(
        draw._draw_kernel, architecture, types, constants | {"candidates_ptr": None}, num_warps=4
    )
    of_many = compiling.compile_kernel(
        draw._draw_kernel,
        architecture,
        types | {"candidates_ptr": "*fp64"},
        constants | {"floors_ptr": None},
        num_warps=4,
    )
    settled = compiling.compile_kernel(
        draw._settle_kernel,
        architecture,
        types | {"gathered_ptr": "*fp64"},
        {"RANKS_PADDED": 8, "NO_TOKEN": -1, "PDL": is_hopper},
        num_warps=1,
    )

    assert not any(compiling.spilled_bytes(one, tmp_path) for one in (sums, drawn, of_many, settled))


@pytest.mark.parametrize(("kind", "unit"), [("*bf16", 1 << 16), ("*fp32", 1)])
def test_filters_keep_their_registers(
    compiling: ModuleType, architecture: int, kind: str, unit: int, tmp_path: Path
) -> None:
    types = dict.fromkeys(("temperatures_ptr", "min_ps_ptr", "top_ps_ptr", "floors_ptr"), "*fp32")
    types |= dict.fromkeys(("top_ks_ptr", "rows_ptr", "num_rows_ptr"), "*i32") | {"logits_ptr": kind}

    compiled = compiling.compile_kernel(
        filters._filter_floors_kernel,
        architecture,
        types,
        filters.kernel_constants(128256, unit) | {"PDL": architecture == 90},
        num_warps=filters.NUM_WARPS,
    )

    assert compiled.metadata.shared <= compiling.SHARED_MEMORY_BYTES[architecture]
    assert compiling.spilled_bytes(compiled, tmp_path) == 0
