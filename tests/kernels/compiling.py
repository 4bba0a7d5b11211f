"""Compiles kernels for a GPU that need not be there, and says what became of their registers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of a program, by architecture."""


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
    return compile_source(source, architecture, num_warps=num_warps, num_stages=num_stages)


def compile_source(source: ASTSource, architecture: int, **options: int) -> object:
    """Compile what says by itself how it is called, a kernel of Gluon's among it."""
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
