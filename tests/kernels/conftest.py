"""Fixtures of the kernels' tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The builder of ``paged_cache.py``, which the interpreter's program uses as well."""
    spec = importlib.util.spec_from_file_location("paged_cache", Path(__file__).with_name("paged_cache.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_cache


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Leave the machine's other cores to others; draw the same inputs each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
