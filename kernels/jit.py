"""Triton where it is installed, and a stand-in where it is not (a Mac): kernels then fail at launch, not on import."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

try:
    import triton
    import triton.language as tl
except ImportError:

    class _NeedsTriton:
        """Takes a kernel's place; indexing it, as a launch does, says what is missing."""

        def __init__(self, kernel: Callable[..., Any]) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object) -> NoReturn:
            raise RuntimeError(f"{self.kernel.__name__} needs Triton, which is not installed")

    def _jit(kernel: Callable[..., Any] | None = None, **options: object) -> Any:
        return _NeedsTriton(kernel) if kernel is not None else _NeedsTriton

    triton = SimpleNamespace(jit=_jit, cdiv=lambda x, y: -(-x // y))
    tl = SimpleNamespace(constexpr=object)

__all__ = ["tl", "triton"]
