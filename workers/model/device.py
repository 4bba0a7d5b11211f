"""Which number format a device computes in."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.engine.errors import UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(wanted: str, stored: str, device: torch.device, cpu_flags: frozenset[str]) -> torch.dtype:
    """Return the dtype of weights, activations and KV.

    "auto" is the stored type on CUDA (float32 weights become bfloat16), and on a CPU float32, but bfloat16 for
    weights stored so where the CPU multiplies tiles of it (AMX). A CPU without bfloat16 instructions emulates
    them several times slower than float32, so that asking for it there is refused.

    Raises:
        UserError: an unknown name, or arithmetic that the device does not have.
    """
    if wanted == "auto":
        if device.type == "cuda":
            return torch.float16 if stored == "float16" else torch.bfloat16
        return torch.bfloat16 if stored == "bfloat16" and "amx_bf16" in cpu_flags else torch.float32
    if wanted not in _DTYPES:
        raise UserError(f"dtype {wanted!r} is unknown; auto, {', '.join(_DTYPES)} are", "dtype")
    dtype = _DTYPES[wanted]
    if device.type == "cpu" and dtype != torch.float32:
        if dtype == torch.float16:
            raise UserError("float16 has no fast arithmetic on a CPU; take float32", "dtype")
        if not cpu_flags & {"avx512_bf16", "amx_bf16"}:
            raise UserError("this CPU has no bfloat16 instructions; take float32", "dtype")
    return dtype


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the KV cache's numbers for activations of ``dtype``: "auto" keeps them, "fp8" is e4m3.

    Raises:
        UserError: an unknown name, or a GPU that cannot convert.
    """
    if wanted == "auto":
        return dtype
    if wanted not in ("fp8", "fp8_e4m3"):
        raise UserError(f"KV cache dtype {wanted!r} is unknown; auto and fp8 are", "kv_cache_dtype")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError("this GPU has no FP8 numbers (Ada and Hopper have); take auto", "kv_cache_dtype")
    return torch.float8_e4m3fn


def read_cpu_flags() -> frozenset[str]:
    """Instruction sets by the names Linux gives them; empty where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
