"""The Triton kernels compile for sm_80 and sm_90 without a GPU: no register spills, and wgmma where it is wanted."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kernels import (  # noqa: E402
    all_reduce,
    block_copy,
    decode_attention_work,
    draw,
    few_rows,
    filters,
    gemv,
    log_sum_exp,
    paged_decode_attention,
    prefill_attention,
    prefill_attention_hopper,
    rms_norm,
    rope_kv_write,
    shared_prefix_attention,
    silu_mul,
    token_mask,
    top_tokens,
)
from kernels.jit import gl  # noqa: E402

ARCHITECTURES = (80, 90)
PLAIN = {"WINDOW": 0, "SOFT_CAP": 0.0}
WINDOWED = {"WINDOW": 4096, "SOFT_CAP": 72.0}
SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024}


def compile_kernel(
    kernel: object,
    architecture: int,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    num_warps: int,
    num_stages: int = 2,
) -> object:
    """Compile for a GPU that need not be there. Arguments not named in ``types`` are int32; pointers are aligned."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def spilled_bytes(compiled: object, tmp_path: Path) -> int:
    """Bytes of stack and local memory that the kernel's registers spill to."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert found, usage
    return sum(map(int, found))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "options"),
    [
        *((size, 16, PLAIN) for size in (64, 80, 96, 128, 256)),
        *((size, 32, WINDOWED) for size in (128, 256)),
    ],
)
def test_prefill_attention_keeps_its_registers(
    architecture: int, head_dim: int, block_size: int, options: dict[str, float], tmp_path: Path
) -> None:
    tiles = prefill_attention.prefill_tiles(head_dim, 2, architecture == 90, options["WINDOW"] > 0)

    compiled = compile_kernel(
        prefill_attention._prefill_attention_kernel,
        architecture,
        dict.fromkeys(("q_ptr", "kv_cache_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("block_tables_ptr", "query_starts_ptr", "context_lens_ptr"), "*i32")
        | {"scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "HEAD_PADDED": 1 << (head_dim - 1).bit_length(),
            "QUERIES": tiles.queries,
            "TILE": tiles.tokens,
            **options,
        },
        tiles.num_warps,
        tiles.num_stages,
    )

    assert spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[architecture]
    if architecture == 90:
        assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"), [(128, 16, "bf16"), (128, 64, "bf16"), (64, 32, "fp16")]
)
def test_prefill_attention_of_hopper_keeps_its_registers(
    head_dim: int, block_size: int, dtype: str, tmp_path: Path
) -> None:
    gluon_runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    kernel, layout = prefill_attention_hopper._prefill_kernel, gl.NVMMASharedLayout(128, 16, rank=2)
    constants = {
        "NUM_HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE": prefill_attention_hopper._TILE,
        "STAGES": prefill_attention_hopper._STAGES,
        "REGISTERS": prefill_attention_hopper._REGISTERS,
        "num_warps": 4,
    }
    types = dict.fromkeys(("block_tables_ptr", "tiles_ptr", "num_tiles_ptr"), "*i32") | {
        "q_desc": f"tensordesc<{dtype}[64, {head_dim}],{layout!r}>",
        "blocks_desc": f"tensordesc<{dtype}[{block_size}, 64],{layout!r}>",
        "out_ptr": f"*{dtype}",
        "scale_log2": "fp32",
    }
    names = kernel.arg_names
    source = gluon_runtime.GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index("out_ptr"),): [["tt.divisibility", 16]]},
    )

    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})

    assert spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[90]
    assert "wgmma" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 16), (128, 32), (256, 64)])
@pytest.mark.parametrize("is_split", [False, True])
def test_decode_attention_keeps_its_registers(
    architecture: int, head_dim: int, block_size: int, is_split: bool, tmp_path: Path
) -> None:
    compiled = compile_kernel(
        paged_decode_attention._paged_decode_attention_kernel,
        architecture,
        dict.fromkeys(("q_ptr", "kv_cache_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("block_tables_ptr", "context_lens_ptr"), "*i32")
        | {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "GROUP_PADDED": 16,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "HEAD_PADDED": 1 << (head_dim - 1).bit_length(),
            "TILE": paged_decode_attention.TILE,
            "SPLIT_TOKENS": paged_decode_attention.SPLIT_TOKENS,
            "IS_SPLIT": is_split,
            **PLAIN,
        },
        num_warps=4,
        num_stages=paged_decode_attention.NUM_STAGES,
    )

    assert spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_merge_of_splits_keeps_its_registers(architecture: int, tmp_path: Path) -> None:
    compiled = compile_kernel(
        paged_decode_attention._merge_splits_kernel,
        architecture,
        {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "context_lens_ptr": "*i32", "out_ptr": "*bf16"},
        {"HEAD_DIM": 128, "HEAD_PADDED": 128, "WINDOW": 4096, "SPLIT_TOKENS": 512},
        num_warps=1,
    )

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("has_other", "has_residual"), [(False, False), (False, True), (True, True)])
def test_rms_norm_keeps_its_registers(
    architecture: int, has_other: bool, has_residual: bool, tmp_path: Path
) -> None:
    compiled = compile_kernel(
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

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_kv_write_keeps_its_registers(architecture: int, has_norm: bool, tmp_path: Path) -> None:
    compiled = compile_kernel(
        rope_kv_write._rope_kv_write_kernel,
        architecture,
        dict.fromkeys(("qkv_ptr", "kv_cache_ptr", "q_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16")
        | {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_sin_ptr": "*fp32", "eps": "fp32"}
        | {"k_inverse": "fp32", "v_inverse": "fp32"},
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": 128,
            "HALF_PADDED": 64,
            "HEADS": rope_kv_write.HEADS,
            "HAS_NORM": has_norm,
            "MOST": 0.0,
            "PDL": architecture == 90,
        },
        num_warps=2,
    )

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_silu_mul_keeps_its_registers(architecture: int, tmp_path: Path) -> None:
    compiled = compile_kernel(
        silu_mul._silu_mul_kernel,
        architecture,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        {"BLOCK": 1024, "IS_GELU": False, "PDL": architecture == 90},
        num_warps=4,
    )

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "options"),
    [
        *((64, 16, 3, PLAIN), (128, 16, 4, PLAIN), (80, 32, 1, PLAIN), (256, 64, 8, PLAIN)),
        *((128, 16, 4, WINDOWED), (256, 16, 2, WINDOWED)),
    ],
)
def test_decode_attention_over_work_keeps_its_registers(
    architecture: int,
    head_dim: int,
    block_size: int,
    group: int,
    options: dict[str, float],
    tmp_path: Path,
) -> None:
    launch = decode_attention_work.work_options(head_dim, 2, architecture == 90, options == PLAIN)
    compiled = compile_kernel(
        decode_attention_work._decode_work_kernel,
        architecture,
        dict.fromkeys(("q_ptr", "kv_cache_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(
            ("block_tables_ptr", "items_ptr", "shares_ptr", "token_positions_ptr", "counters_ptr"), "*i32"
        )
        | {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "PDL": architecture == 90,
            **options,
            **decode_attention_work.work_constants(head_dim, group, launch["num_warps"]),
        },
        **launch,
    )

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize(
    ("head_dim", "group", "options"), [(64, 3, PLAIN), (128, 4, PLAIN), (128, 2, PLAIN), (128, 4, WINDOWED)]
)
def test_shared_prefix_attention_keeps_its_registers(
    head_dim: int, group: int, options: dict[str, float], tmp_path: Path
) -> None:
    compiled = compile_kernel(
        shared_prefix_attention._shared_prefix_kernel,
        90,
        dict.fromkeys(("q_ptr", "kv_cache_ptr"), "*bf16")
        | dict.fromkeys(
            (
                "block_tables_ptr",
                "items_ptr",
                "num_items_ptr",
                "members_ptr",
                "first_slots_ptr",
                "token_positions_ptr",
            ),
            "*i32",
        )
        | {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale_log2": "fp32"},
        {
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HEAD_DIM": head_dim,
            "PDL": True,
            **options,
            **shared_prefix_attention.shared_constants(head_dim, group, element_size=2),
        },
        num_warps=8,
        num_stages=2,
    )

    assert spilled_bytes(compiled, tmp_path) == 0
    assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("has_norm", "is_gated", "has_residual"), [(1, 0, 0), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("width", [576, 4096])
def test_gemv_keeps_its_registers(
    architecture: int, has_norm: bool, is_gated: bool, has_residual: bool, width: int, tmp_path: Path
) -> None:
    step, rows, num_warps = gemv.gemv_tiles(width, bool(is_gated), bool(has_residual))

    compiled = compile_kernel(
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

    assert spilled_bytes(compiled, tmp_path) == 0
    if width % step == 0:
        assert "ld.global.L1::evict_first.v4" in compiled.asm["ptx"] or "v4.b32" in compiled.asm["ptx"]
    if architecture == 90:  # weights are asked for while the kernel ahead still runs
        ahead = compiled.asm["ptx"].partition("griddepcontrol.wait")[0]
        assert "ld.global" in ahead


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_rows", [16, 32, 64])
@pytest.mark.parametrize("kind", ["parts", "whole", "gated"])
def test_products_of_few_rows_keep_their_registers(
    architecture: int, num_rows: int, kind: str, tmp_path: Path
) -> None:
    tiles = few_rows.parts_tiles(4096, 14336, num_rows) if kind == "parts" else few_rows.whole_tiles(num_rows)

    compiled = compile_kernel(
        few_rows._few_rows_kernel,
        architecture,
        {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*fp32" if kind == "parts" else "*bf16"},
        {
            "NUM_OUT": 4096,
            "WIDTH": 14336,
            "ROWS": num_rows,
            "WEIGHT_ROWS": tiles.weight_rows // (2 if kind == "gated" else 1),
            "COLUMNS": tiles.columns,
            "PARTS": tiles.parts,
            "IS_GATED": kind == "gated",
            "PDL": architecture == 90,
        },
        tiles.num_warps,
        tiles.num_stages,
    )

    assert spilled_bytes(compiled, tmp_path) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masks_keep_their_registers(architecture: int, tmp_path: Path) -> None:
    types = {"logits_ptr": "*bf16", "allowed_ptr": "*u8"}

    compiled = compile_kernel(
        token_mask._forbid_kernel, architecture, types, {"BLOCK": token_mask._BLOCK}, num_warps=4
    )

    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_keep_their_registers(architecture: int, tmp_path: Path) -> None:
    sums = compile_kernel(
        log_sum_exp._log_sum_exp_kernel,
        architecture,
        {"x_ptr": "*fp32", "out_ptr": "*fp32"},
        {"BLOCK": log_sum_exp._BLOCK},
        num_warps=8,
    )
    tops = compile_kernel(
        top_tokens._top_tokens_kernel,
        architecture,
        {"logits_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i64"},
        {"BLOCK": top_tokens._BLOCK},
        num_warps=16,
    )

    assert spilled_bytes(sums, tmp_path) == spilled_bytes(tops, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_draw_keeps_its_registers(architecture: int, tmp_path: Path) -> None:
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

    sums = compile_kernel(
        draw._race_stretches_kernel,
        architecture,
        types,
        {"STRETCH": draw.STRETCH, "HEATS": draw.HEATS, "RACE": 0, "PDL": is_hopper},
        num_warps=4,
    )
    constants = {"STRETCH": draw.STRETCH, "PARTS_PADDED": 32, "RACE": 1, "NO_TOKEN": -1, "PDL": is_hopper}
    drawn = compile_kernel(
        draw._draw_kernel, architecture, types, constants | {"candidates_ptr": None}, num_warps=4
    )
    of_many = compile_kernel(
        draw._draw_kernel,
        architecture,
        types | {"candidates_ptr": "*fp64"},
        constants | {"floors_ptr": None},
        num_warps=4,
    )
    settled = compile_kernel(
        draw._settle_kernel,
        architecture,
        types | {"gathered_ptr": "*fp64"},
        {"RANKS_PADDED": 8, "NO_TOKEN": -1, "PDL": is_hopper},
        num_warps=1,
    )

    assert not any(spilled_bytes(one, tmp_path) for one in (sums, drawn, of_many, settled))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "unit"), [("*bf16", 1 << 16), ("*fp32", 1)])
def test_filters_keep_their_registers(architecture: int, kind: str, unit: int, tmp_path: Path) -> None:
    types = dict.fromkeys(("temperatures_ptr", "min_ps_ptr", "top_ps_ptr", "floors_ptr"), "*fp32")
    types |= dict.fromkeys(("top_ks_ptr", "rows_ptr", "num_rows_ptr"), "*i32") | {"logits_ptr": kind}

    compiled = compile_kernel(
        filters._filter_floors_kernel,
        architecture,
        types,
        filters.kernel_constants(128256, unit) | {"PDL": architecture == 90},
        num_warps=filters.NUM_WARPS,
    )

    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[architecture]
    assert spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_flagged", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_parts"), [(8, 0), (2, 2)])
def test_sums_over_ranks_write_16_bytes_at_once_and_order_what_is_read(
    architecture: int, is_flagged: bool, num_ranks: int, num_parts: int, tmp_path: Path
) -> None:
    block = 4096

    compiled = compile_kernel(
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
    assert spilled_bytes(compiled, tmp_path) == 0
    assert "st.global.v4.b32" in ptx
    assert "ld.volatile.global.v4.b32" in ptx
    # Without flags beside the elements a fence stands between a row and the number that announces it.
    assert ("atom.global.sys.release" in ptx) is not is_flagged
    assert ("ld.global.sys.acquire" in ptx) is not is_flagged


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_block_copy_moves_sixteen_bytes_at_a_time(architecture: int, tmp_path: Path) -> None:
    compiled = compile_kernel(
        block_copy._copy_blocks_kernel,
        architecture,
        {"source": "*i64", "target": "*i64", "pairs": "*i32"},
        {"CHUNK": block_copy._CHUNK},
        num_warps=block_copy._NUM_WARPS,
    )

    assert spilled_bytes(compiled, tmp_path) == 0
    assert re.search(r"ld\.global\S*\.v2\.b64|cp\.async", compiled.asm["ptx"])
