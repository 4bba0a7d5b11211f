"""The Triton kernels agree with their references in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOLERANCES = {"float32": 2e-6, "float16": 2e-3}


def test_every_kernel_agrees_with_its_reference() -> None:
    program = Path(__file__).with_name("interpret_kernels.py")

    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=150)

    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout)
    assert len(errors) >= 30
    too_large = {
        name: error for name, error in errors.items() if not error <= TOLERANCES[name.rpartition(".")[2]]
    }
    assert too_large == {}
