"""The Triton kernels agree with their references in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton")

TOLERANCES = {"float32": 4e-6, "float16": 2e-3}


pytestmark = pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 does not work with numpy 2.4",
)


@pytest.mark.parametrize(
    ("name", "least"),
    [("interpret_kernels", 30), ("interpret_chunks", 15), ("interpret_quantized", 60)],
    ids=["model", "chunks", "quantized"],
)
def test_every_kernel_agrees_with_its_reference(name: str, least: int) -> None:
    program = Path(__file__).with_name(f"{name}.py")

    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=150)

    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout)
    assert len(errors) >= least
    too_large = {
        name: error for name, error in errors.items() if not error <= TOLERANCES[name.rpartition(".")[2]]
    }
    assert too_large == {}


def test_ranks_add_up_what_they_bring_and_hold_the_same_bits() -> None:
    program = Path(__file__).with_name("interpret_all_reduce.py")

    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=150)

    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout)
    assert len(errors) == 4
    too_large = {
        name: error for name, error in errors.items() if not error <= TOLERANCES[name.rpartition(".")[2]]
    }
    assert too_large == {}
