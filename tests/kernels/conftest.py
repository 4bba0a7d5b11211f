"""Fixtures of the kernels' tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The builder of ``paged_cache.py``, which the interpreter's program uses as well."""
    return _module_beside("paged_cache").make_cache


@pytest.fixture(scope="session")
def compiling() -> ModuleType:
    """``compiling.py``; needs Triton."""
    return _module_beside("compiling")


@pytest.fixture(params=[80, 90])
def architecture(request: pytest.FixtureRequest) -> int:
    """Of a GPU: Ampere's and Hopper's."""
    return request.param


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Leave the machine's other cores to others; draw the same inputs each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _module_beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
