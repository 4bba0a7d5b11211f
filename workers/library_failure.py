"""Failures of libraries written in Rust: pyo3 raises their panics past every handler of ``Exception``."""

from __future__ import annotations


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` says that a library failed, and not that this process or task is to end."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
