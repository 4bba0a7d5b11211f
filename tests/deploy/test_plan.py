"""Memory plans agree with what ranks really load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deploy.plan import count_copies, count_weights, fewest_ranks, plan_memory
from workers.checkpoint.model_config import Experts, ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.engine.errors import InvalidRequest
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

TINY = ModelConfig(
    "llama", 128, 256, 3, 4, 2, head_dim=32, vocab_size=96, max_position_embeddings=64, has_qkv_bias=True
)
LLAMA_8B = ModelConfig(
    "llama", 4096, 14336, 32, 32, 8, head_dim=128, vocab_size=128256, max_position_embeddings=8192
)
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
AWQ = Quantization("awq", bits=4, group_size=128, has_zeros=True)
GIB = 2**30


def loaded_bytes(config: ModelConfig, how: Quantization | None) -> int:
    """All tensors that a rank holds after loading, 32-bit numbers counted as the 16 bits of a GPU."""
    rank = Rank(
        RankConfig(load_format="dummy", model_config=replace(config, quantization=how), pack_weights=False)
    )
    rank.load()
    decoder, seen = rank._decoder, {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)
        elif type(value).__module__.startswith(("workers.model", "kernels")):
            names = getattr(value, "__slots__", None) or vars(value)
            for name in names:
                if name not in ("_stored", "_form"):
                    visit(getattr(value, name))

    for part in (decoder.layers, decoder.embedding, decoder.norm, decoder.head):
        visit(part)
    return sum(t.numel() * (2 if t.dtype == torch.float32 else t.element_size()) for t in seen.values())


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, tie_word_embeddings=True, has_qk_norm=True),
        replace(TINY, architecture="qwen3_moe", has_qkv_bias=False, experts=Experts(4, 2, 64, True, (1,))),
    ],
    ids=["plain", "tied", "experts"],
)
def test_weights_in_full_are_counted_to_the_byte(config: ModelConfig) -> None:
    counted = count_weights(config, None)

    assert counted.split + counted.whole == loaded_bytes(config, None)


def test_codes_are_counted_to_the_byte() -> None:
    # An odd number of groups would be padded.
    config = replace(TINY, has_qkv_bias=False, hidden_size=256, intermediate_size=512, head_dim=64)
    counted = count_weights(config, AWQ)

    assert counted.split + counted.whole == loaded_bytes(config, AWQ)


def test_known_models_have_their_known_sizes() -> None:
    weights = count_weights(LLAMA_8B, None)

    assert weights.split + weights.whole == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert plan_memory(LLAMA_8B, None, 126 * GIB, 8192, 1).kv_bytes_per_token == 131072
    assert count_weights(LLAMA_8B, AWQ).split == pytest.approx(5.7e9, rel=0.02)


def test_as_many_ranks_are_taken_as_the_weights_need() -> None:
    gpu_bytes = int(79.6 * 0.9 * GIB)

    assert fewest_ranks(LLAMA_8B, None, gpu_bytes, 8192).tensor_parallel_size == 1
    assert fewest_ranks(LLAMA_70B, None, gpu_bytes, 8192).tensor_parallel_size == 4
    assert fewest_ranks(LLAMA_70B, AWQ, gpu_bytes, 8192).tensor_parallel_size == 1
    with pytest.raises(InvalidRequest, match="shorter context"):
        fewest_ranks(LLAMA_70B, None, GIB, 8192)


def test_the_command_prints_the_plan(tmp_path) -> None:
    from deploy.commands import app

    shape = "deploy/bench/shapes/llama-3-8b-awq"
    result = CliRunner().invoke(app, ["plan", shape, "--gpu", "H200", "--context", "4096"])

    assert result.exit_code == 0, result.output
    for expected in ("awq", "18.36 GiB", "128 KiB", "requests of 4,096 tokens"):
        assert expected in result.output


def test_only_groups_that_can_share_the_model_are_planned(tmp_path) -> None:
    from transformers import GPT2Config

    from deploy.commands import app

    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)

    result = CliRunner().invoke(app, ["plan", str(tmp_path)])

    assert result.exit_code == 0, result.output
    heading = next(line for line in result.output.splitlines() if "tensor parallel" in line)
    assert [cell.strip() for cell in heading.split("┃")] == ["", "tensor parallel", "1", ""]


def test_an_unknown_gpu_is_refused_with_those_known() -> None:
    from deploy.commands import app

    result = CliRunner().invoke(app, ["plan", "deploy/bench/shapes/llama-3-8b", "--gpu", "H300"])

    assert isinstance(result.exception, InvalidRequest)
    assert "H200" in str(result.exception)


def test_codes_are_counted_with_their_copy_in_16_bits_where_a_gpu_keeps_one() -> None:
    how = Quantization("awq", bits=4, group_size=32, has_zeros=True)
    copies = count_copies(TINY, how)
    shape = (TINY, how, 10**9, 64, 1)

    codes = plan_memory(*shape).weight_bytes

    assert plan_memory(*shape, device_bytes=8 * copies).weight_bytes == codes + copies
    assert plan_memory(*shape, device_bytes=8 * copies - 8).weight_bytes == codes
    assert count_copies(TINY, Quantization("fp8")) == 0


def test_a_context_beyond_the_models_is_refused() -> None:
    from deploy.commands import app

    shape = "deploy/bench/shapes/llama-3-8b"
    result = CliRunner().invoke(app, ["plan", shape, "--gpu", "H200", "--context", "20000"])

    assert isinstance(result.exception, InvalidRequest)
    assert "--context is 20,000, the model takes at most 8,192 tokens" in str(result.exception)
