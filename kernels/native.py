"""The CPU's own kernels, compiled from ``native.c`` and ``narrow.c`` on first use, where the machine has a C compiler.

Without one, or with another OpenMP than torch's, everything runs on the torch references: slower, same results up
to rounding. The library is kept in the user's cache, by a digest of all that it depends on.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.c", "narrow.c"))
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
_MACHINE_FLAGS = ("-march=native", "-mcpu=native")
"""The first is gcc's and clang's on x86, the second clang's on ARM."""
_COMPILE_TIMEOUT_S = 120

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "shoal_rms_norm": (_POINTER,) * 4 + (_SIZE,) * 2 + (_FLOAT,),
    "shoal_silu_mul": (_POINTER,) * 2 + (_SIZE,) * 2,
    "shoal_rope_kv_write": (_POINTER,) * 8 + (_FLOAT,) + (_SIZE,) * 7,
    "shoal_round_groups": (_POINTER,) * 4 + (_SIZE,) * 3,
    "shoal_narrow_linear": (_POINTER,) * 9 + (_SIZE,) * 4,
    "shoal_paged_decode_attention": (_POINTER,) * 6 + (_FLOAT,) + (_SIZE,) * 8,
}
MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 64
HEAD_DIM_STEP = 16
"""Decode attention takes multiples of it."""


class NativeKernels:
    """The compiled functions, on float32 CPU tensors. Shapes are checked by the ops' launchers."""

    def __init__(self, path: Path) -> None:
        """Load ``path``; raise ``OSError`` where a symbol (OpenMP's, say) is missing."""
        self._library = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = types
            function.restype = None

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See ``kernels.rms_norm``."""
        out = torch.empty_like(x)
        self._library.shoal_rms_norm(
            x.data_ptr(),
            residual.data_ptr() if residual is not None else None,
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``kernels.silu_mul``."""
        num_tokens, width = gate_up.shape
        out = gate_up.new_empty(num_tokens, width // 2)
        self._library.shoal_silu_mul(gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2)
        return out

    def rope_kv_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        layer: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See ``kernels.rope_kv_write``."""
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        num_tokens = slots.shape[0]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        q = qkv.new_empty(num_tokens, num_heads, head_dim)
        self._library.shoal_rope_kv_write(
            qkv.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            cos_sin.data_ptr(),
            kv_cache.data_ptr(),
            q.data_ptr(),
            q_norm.data_ptr() if q_norm is not None else None,
            k_norm.data_ptr() if k_norm is not None else None,
            eps,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_layers,
            layer,
        )
        return q

    def narrow_linear(
        self,
        x: Tensor,
        data: Tensor,
        row_scales: Tensor | None,
        scales: Tensor | None,
        offsets: Tensor | None,
        bias: Tensor | None,
        group: int,
        num_out: int,
    ) -> Tensor:
        """See ``kernels.narrow_linear``."""
        num_rows, width = x.shape
        num_groups = width // group
        values = torch.empty(num_rows, width, dtype=torch.int8)
        group_scales = torch.empty(num_rows, num_groups)
        sums = torch.empty(num_rows, num_groups, dtype=torch.int32)
        out = torch.empty(num_rows, num_out)
        rounded = (values.data_ptr(), group_scales.data_ptr(), sums.data_ptr())
        self._library.shoal_round_groups(x.data_ptr(), *rounded, num_rows, width, group)
        parts = (None if part is None else part.data_ptr() for part in (row_scales, scales, offsets, bias))
        self._library.shoal_narrow_linear(
            *rounded, data.data_ptr(), *parts, out.data_ptr(), num_rows, width, group, num_out
        )
        return out

    def paged_decode_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: int,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
    ) -> Tensor:
        """See ``kernels.paged_decode_attention``."""
        num_rows, num_heads, head_dim = q.shape
        _, num_layers, _, num_kv_heads, block_size, _ = kv_cache.shape
        out = torch.empty_like(q)
        scratch = q.new_empty(2 * num_rows * num_heads)
        self._library.shoal_paged_decode_attention(
            q.data_ptr(),
            kv_cache.data_ptr(),
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            scale,
            num_rows,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_layers,
            layer,
            block_tables.stride(0),
        )
        return out


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled kernels, or None (said once in the log) where they cannot be had."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.info("no C compiler found: the CPU runs the slower torch kernels")
        return None
    folder = platformdirs.user_cache_path("shoal") / "native"
    path = folder / f"kernels-{_digest(compiler)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(compiler, path)
        return NativeKernels(path)
    except (OSError, subprocess.SubprocessError) as error:
        logger.info(
            "the CPU runs the slower torch kernels, since its own cannot be compiled or loaded: %s", error
        )
        return None


def _digest(compiler: str) -> str:
    """Of the source and all that decides what comes of it: compiler, flags, processor, torch's OpenMP."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
        processor = "".join(line for line in processor.splitlines() if line.startswith(("flags", "Features")))
    except OSError:
        processor = platform.processor()
    compiler_path = os.path.realpath(compiler)
    parts = [compiler_path, str(os.path.getmtime(compiler_path)), *_FLAGS, processor, torch.__version__]
    sources = b"".join(source.read_bytes() for source in _SOURCES)
    return hashlib.blake2b("\n".join(parts).encode() + sources, digest_size=12).hexdigest()


def _compile(compiler: str, path: Path) -> None:
    """Write the library to ``path`` in one rename, so that processes may compile at once.

    Compiling with OpenMP but linking without leaves its symbols to the library that torch has loaded: a second
    OpenMP in the process would have threads of its own on the same cores.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library_path = Path(folder) / "native.so"
        for machine_flag in _MACHINE_FLAGS:
            command = [
                compiler,
                *_FLAGS,
                machine_flag,
                "-fopenmp",
                "-fPIC",
                "-c",
                *map(str, _SOURCES),
            ]
            compiled = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
            )
            if compiled.returncode == 0:
                break
        else:
            raise OSError(
                compiled.stderr.strip().splitlines()[0] if compiled.stderr else "the compiler failed"
            )
        subprocess.run(
            [compiler, "-shared", *(f"{source.stem}.o" for source in _SOURCES), "-o", str(library_path)],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        os.replace(library_path, path)
