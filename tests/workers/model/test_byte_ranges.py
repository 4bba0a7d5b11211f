"""A rank reads its own bytes of a checkpoint, not the others'."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workers.checkpoint.model_config import ModelConfig
from workers.model.sharding import make_shard
from workers.model.tensor_source import SafetensorsSource

NAME = "model.layers.0.mlp.up_proj.weight"
MODEL = ModelConfig("llama", 1024, 8192, 1, 8, 8, head_dim=128, vocab_size=64)


def resident_bytes(path: Path) -> int:
    """How much of a file this process has touched through its mappings."""
    kib, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what has been read")
@pytest.mark.parametrize("tp_rank", [0, 5])
def test_a_rank_touches_its_rows_alone(tmp_path: Path, tp_rank: int) -> None:
    path = tmp_path / "model.safetensors"
    weight = torch.arange(8192.0)[:, None].expand(8192, 1024).to(torch.float16).contiguous()
    save_file({NAME: weight}, path)
    rows = make_shard(MODEL, tp_rank, 8).intermediate

    whole = SafetensorsSource(tmp_path).read(NAME, (8192, 1024))
    own = whole[rows.start : rows.stop].clone()

    assert torch.equal(own, weight[rows.start : rows.stop])
    # 2 of 16 MiB; the kernel maps up to 2 MiB at once, so a little more at both ends.
    assert own.nbytes <= resident_bytes(path) < own.nbytes + (4 << 20)
