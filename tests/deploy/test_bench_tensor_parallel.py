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


def test_quantized_layers_are_read_in_fewer_bytes_and_the_head_is_not() -> None:
    config = read_model_config(ModelFiles(SHAPES / "llama-3-70b", "llama-3-70b"))
    full, halved = (tensor_parallel.weight_bytes(config, kind) for kind in (None, "fp8"))

    assert full == pytest.approx(139.0e9, rel=1e-3)
    assert full - halved == (full - 2 * 128256 * 8192) / 2
