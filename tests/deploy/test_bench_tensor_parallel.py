"""The bytes that the floor of a decode step is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench import tensor_parallel
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles

SHAPES = Path(tensor_parallel.__file__).parent / "shapes"


def test_a_step_of_an_8b_model_reads_15_gb_of_weights_and_128_kib_a_token() -> None:
    config = read_model_config(ModelFiles(SHAPES / "llama-3-8b", "llama-3-8b"))

    assert tensor_parallel.weight_bytes(config) == pytest.approx(15.01e9, rel=1e-3)
    assert tensor_parallel.kv_bytes(config) == 131072
