"""Ranks that share a model, each in a process of its own over gloo, answer as one rank does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

from workers.checkpoint.model_config import Experts, ModelConfig
from workers.checkpoint.source import ModelFiles

pytestmark = pytest.mark.timeout(400)

TINY = {
    "architecture": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_layers": 2,
    "head_dim": 16,
    "vocab_size": 2200,
    "max_position_embeddings": 256,
    "has_qkv_bias": True,
}


Spec = dict[str, object]
Generate = Callable[[Spec, int], list[list[list[int]]]]


@pytest.fixture
def generate(run_ranks) -> Generate:
    """Run one process a rank on the same plans; what each says was generated."""
    return lambda spec, tp_size: run_ranks("plan_driver.py", json.dumps(spec), tp_size=tp_size, limit_s=180)


@pytest.fixture
def generate_alone(plan_driver: ModuleType) -> Callable[[Spec], list[list[int]]]:
    """The same by one rank, in this process."""
    return plan_driver.run_group


def test_two_ranks_give_the_golden_tokens_with_sums_under_way(
    generate: Generate, demo_model: ModelFiles, goldens
) -> None:
    cases = goldens[:4]
    spec = {
        "model": str(demo_model.path),
        "prompts": [case["prompt_token_ids"] for case in cases],
        "num_tokens": 24,
        "overlapped_tokens": 16,  # the prompts, and no decode step
    }

    by_rank = generate(spec, 2)

    assert by_rank == [[case["output_token_ids"][:24] for case in cases]] * 2


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads"), [(4, 2), (8, 4)]
)  # of four KV heads two ranks share each
def test_more_ranks_read_their_shards_of_a_checkpoint_and_give_one_ranks_tokens(
    generate: Generate, generate_alone, tp_size: int, num_kv_heads: int, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2200, hidden_size=64, intermediate_size=50, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=num_kv_heads, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    params = [{"max_tokens": 8, "ignore_eos": True, **fields} for fields in ({"temperature": 0}, {"seed": 5})]
    spec = {
        "model": str(tmp_path),
        "prompts": [[1, 2, 3], list(range(40))],
        "num_tokens": 8,
        "params": params,
        "chunk": 16,
    }

    alone = generate_alone(spec)

    assert generate(spec, tp_size) == [alone] * tp_size


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "vocab_size"),
    [
        (3, 1, 2, 2200),
        (5, 5, 2, 2200),
        (9, 3, 8, 700),  # three stretches: each rank holds all of them
    ],
)
@pytest.mark.slow
def test_uneven_and_shared_heads_and_words_give_one_ranks_tokens(
    generate: Generate, generate_alone, num_heads: int, num_kv_heads: int, tp_size: int, vocab_size: int
) -> None:
    shape = TINY | {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "vocab_size": vocab_size}
    seeded = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    spec = {
        "model_config": asdict(ModelConfig(**shape)),
        "prompts": [[1, 2, 3], list(range(40))],
        "num_tokens": 12,
        "params": [{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}, seeded],
    }

    alone = generate_alone(spec)

    assert generate(spec, tp_size) == [alone] * tp_size


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
def test_families_over_two_ranks_give_one_ranks_tokens(
    generate: Generate, generate_alone, family: str
) -> None:
    config = asdict(ModelConfig(**{**TINY, **FAMILIES[family]}, num_heads=4, num_kv_heads=2))
    spec = {"model_config": config, "prompts": [[1, 2, 3], list(range(40))], "num_tokens": 12}

    alone = generate_alone(spec)

    assert generate(spec, 2) == [alone] * 2


@pytest.mark.parametrize("family", ["GPTNeoXConfig", "Olmo2Config", "GraniteConfig"])
@pytest.mark.slow
def test_transformers_layers_over_two_ranks_give_one_ranks_tokens(
    generate: Generate, generate_alone, family: str, tmp_path: Path
) -> None:
    import transformers

    config = getattr(transformers, family)(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    spec = {"model": str(tmp_path), "prompts": [[1, 2, 3], list(range(40))], "num_tokens": 12}

    alone = generate_alone(spec)

    assert generate(spec, 2) == [alone] * 2
