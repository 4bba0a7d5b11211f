"""Two ranks on two GPUs: sums over ranks are right by every way, and tokens are those of one rank.

Nothing else may use the GPUs meanwhile: a kernel that waits for the other GPU's would wait for a time slice there.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = ModelConfig(
    "qwen3", 256, 320, 3, 8, 2, head_dim=64, vocab_size=1001, max_position_embeddings=256, has_qk_norm=True
)


@pytest.mark.parametrize("is_isolated", [False, True])
def test_every_way_of_adding_gives_the_same_sum(run_ranks, is_isolated: bool) -> None:
    errors, others = run_ranks("sum_over_ranks.py", tp_size=2, is_isolated=is_isolated)

    assert errors == others
    for dtype, largest in {"torch.float32": 1e-6, "torch.bfloat16": 1e-2}.items():
        assert set(errors[dtype]) == {"nccl", "flagged", "staged", "copies"}
        assert max(errors[dtype].values()) <= largest


def test_two_ranks_give_one_ranks_tokens_in_float32(run_ranks) -> None:
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

    def generate(tp_size: int, **more: object) -> list[list[list[int]]]:
        return run_ranks("plan_driver.py", json.dumps(spec | more), tp_size=tp_size, limit_s=60)

    (alone,) = generate(1)
    whole = generate(2)
    in_parts = generate(2, overlapped_tokens=40)

    assert whole == [alone] * 2
    assert in_parts == [alone] * 2
