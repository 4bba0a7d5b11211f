"""Ranks that share a model, each in a process of its own over gloo, answer as one rank does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from workers.checkpoint.model_config import Experts, ModelConfig
from workers.checkpoint.source import ModelFiles

PROGRAM = Path(__file__).with_name("plan_driver.py")
TINY = {
    "architecture": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_layers": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "has_qkv_bias": True,
}


def run_ranks(spec: dict[str, object], tp_size: int) -> list[list[list[int]]]:
    """Run one process a rank on the same plans and return what each says was generated."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(spec), str(rank), str(tp_size), rendezvous],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(tp_size)
    ]
    try:
        answers = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaints) in zip(ranks, answers, strict=True):
        assert rank.returncode == 0, complaints
    return [json.loads(printed) for printed, _ in answers]


def test_two_ranks_give_the_golden_tokens(demo_model: ModelFiles, goldens) -> None:
    prompts = [case["prompt_token_ids"] for case in goldens]

    by_rank = run_ranks({"gguf": str(demo_model.path), "prompts": prompts, "num_tokens": 64}, tp_size=2)

    assert by_rank == [[case["output_token_ids"] for case in goldens]] * 2


def test_sums_under_way_while_other_tokens_are_computed_change_nothing(
    demo_model: ModelFiles, goldens
) -> None:
    cases = goldens[:3]
    spec = {
        "gguf": str(demo_model.path),
        "prompts": [case["prompt_token_ids"] for case in cases],
        "num_tokens": 4,
    }

    by_rank = run_ranks(spec | {"overlapped_tokens": 8}, tp_size=2)

    assert by_rank == [[case["output_token_ids"][:4] for case in cases]] * 2


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"), [(3, 1, 2), (5, 5, 2), (8, 2, 4), (8, 4, 8), (9, 3, 8)]
)
@pytest.mark.slow
def test_uneven_and_shared_heads_give_one_ranks_tokens(
    num_heads: int, num_kv_heads: int, tp_size: int
) -> None:
    config = asdict(ModelConfig(**TINY, num_heads=num_heads, num_kv_heads=num_kv_heads))
    spec = {"model_config": config, "prompts": [[1, 2, 3], list(range(40))], "num_tokens": 12}

    (alone,) = run_ranks(spec, tp_size=1)

    assert run_ranks(spec, tp_size) == [alone] * tp_size


FAMILIES = {
    "experts": {"architecture": "qwen3_moe", "has_qk_norm": True, "experts": Experts(6, 2, 33, True, (1,))},
    "gemma": {
        "architecture": "gemma3",
        "has_qkv_bias": False,
        "activation": "gelu_tanh",
        "windows": (8, 0),
        "rope_kinds": ("local", "global"),
        "attention_soft_cap": 5.0,
        "logit_soft_cap": 3.0,
        "embedding_scale": 7.0,
        "has_offset_norms": True,
        "has_post_norms": True,
        "tie_word_embeddings": True,
    },
    "phi": {"architecture": "phi3", "has_qkv_bias": False, "rotary_dim": 12},
    "biases": {"has_out_bias": True, "has_mlp_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_families_over_two_ranks_give_one_ranks_tokens(family: str) -> None:
    config = asdict(ModelConfig(**{**TINY, **FAMILIES[family]}, num_heads=4, num_kv_heads=2))
    spec = {"model_config": config, "prompts": [[1, 2, 3], list(range(40))], "num_tokens": 12}

    (alone,) = run_ranks(spec, tp_size=1)

    assert run_ranks(spec, 2) == [alone] * 2
