"""Two ranks on two GPUs: sums over ranks are right by every way, and tokens are those of one rank.

Nothing else may use the GPUs meanwhile: a kernel that waits for the other GPU's would wait for a time slice there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROGRAM = Path(__file__).with_name("plan_driver.py")
SUMS = Path(__file__).with_name("sum_over_ranks.py")
CONFIG = ModelConfig(
    "qwen3", 256, 320, 3, 8, 2, head_dim=64, vocab_size=1001, max_position_embeddings=256, has_qk_norm=True
)


def run_ranks(program: Path, *arguments: str, tp_size: int, is_isolated: bool = False) -> list[object]:
    """One process a rank; ``is_isolated``: each sees its own device alone, as Ray's actors do."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments, str(rank), str(tp_size), f"file://{folder}/meet"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": str(rank)} if is_isolated else {}),
            )
            for rank in range(tp_size)
        ]
        try:
            answers = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, complaints) in zip(ranks, answers, strict=True):
        assert rank.returncode == 0, complaints
    return [json.loads(printed) for printed, _ in answers]


@pytest.mark.parametrize("is_isolated", [False, True])
def test_every_way_of_adding_gives_the_same_sum(is_isolated: bool) -> None:
    errors, others = run_ranks(SUMS, tp_size=2, is_isolated=is_isolated)

    assert errors == others
    for dtype, largest in {"torch.float32": 1e-6, "torch.bfloat16": 1e-2}.items():
        assert set(errors[dtype]) == {"nccl", "flagged", "staged"}
        assert max(errors[dtype].values()) <= largest


def test_two_ranks_give_one_ranks_tokens_in_float32() -> None:
    seeded = [{"max_tokens": 64, "temperature": 1.0, "seed": seed, "ignore_eos": True} for seed in (1, 2)]
    filtered = {"max_tokens": 64, "temperature": 0.8, "seed": 3, "top_p": 0.9, "num_logprobs": 2}
    greedy = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    spec = {
        "model_config": asdict(CONFIG),
        "prompts": [[1, 2, 3], list(range(150)), [9], [1000] * 40],
        "num_tokens": 24,
        "params": [*seeded, filtered, greedy],
        "chunk": 64,
        # Few rows and short steps: few graphs, few kernels to compile.
        "rank": {
            "device": "cuda",
            "dtype": "float32",
            "kv_cache_bytes": 1 << 27,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
        },
    }

    (alone,) = run_ranks(PROGRAM, json.dumps(spec), tp_size=1)
    whole = run_ranks(PROGRAM, json.dumps(spec), tp_size=2)
    in_parts = run_ranks(PROGRAM, json.dumps(spec | {"overlapped_tokens": 40}), tp_size=2)

    assert whole == [alone] * 2
    assert in_parts == [alone] * 2
