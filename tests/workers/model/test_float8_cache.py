"""A KV cache of 8-bit floats: a quarter of float32's memory, answers near those of the full one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError
from workers.engine.plan import BlockCopy, NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

VOCAB = 61
CONFIG = ModelConfig("llama", 64, 96, 3, 4, 2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=256)
DUMMY = RankConfig(load_format="dummy", model_config=CONFIG, num_threads=1)
PROMPT = [(7 * i + 3) % VOCAB for i in range(90)]


def logprobs_of(rank: Rank, chunks: tuple[int, ...] = (90,)) -> torch.Tensor:
    """Of the token after ``PROMPT``, computed in ``chunks``."""
    params = ChoiceParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB)
    row, start = NewRow(0, PROMPT, len(PROMPT), params), 0
    for step, count in enumerate(chunks):
        new, blocks = ([row], [list(range(6))]) if step == 0 else ([], [[]])
        rank.launch(StepPlan(step, new, [0], [start], [count], [start + count == len(PROMPT)], blocks))
        start += count
        result = rank.collect()
    (found,) = result.logprobs or []
    ordered = torch.empty(VOCAB)
    ordered[found.top_token_ids] = torch.tensor(found.top_logprobs)
    return ordered


def loaded(config: RankConfig, num_host_blocks: int = 0) -> Rank:
    rank = Rank(config)
    rank.load()
    rank.allocate(16, num_host_blocks)
    rank.warm_up()
    return rank


def test_a_block_of_8_bit_floats_takes_a_quarter_of_the_memory_and_answers_alike() -> None:
    full, small = loaded(DUMMY), loaded(replace(DUMMY, kv_cache_dtype="fp8"))

    assert 4 * small.block_counts().block_bytes == full.block_counts().block_bytes
    wanted = logprobs_of(full)
    for chunks in ((90,), (40, 49, 1)):
        got = logprobs_of(small, chunks)
        assert 0 < (got - wanted).abs().max() < 0.1 * wanted.std()


def test_the_checkpoints_scales_save_keys_that_would_not_fit(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if "k_proj" in name or "v_proj" in name:
            tensors[name] *= 3000  # beyond e4m3's 448
        if "q_proj" in name or "o_proj" in name:
            tensors[name] /= 3000
    save_file(tensors, tmp_path / "model.safetensors")
    config_of_rank = replace(DUMMY, load_format="auto", model_config=None, files=ModelFiles(tmp_path, "x"))
    wanted = logprobs_of(loaded(config_of_rank))

    cut_off = logprobs_of(loaded(replace(config_of_rank, kv_cache_dtype="fp8")))
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[f"{prefix}k_scale"] = tensors[f"{prefix}v_scale"] = torch.tensor(32.0)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scaled = logprobs_of(loaded(replace(config_of_rank, kv_cache_dtype="fp8")))

    assert (cut_off - wanted).abs().max() > 5 * (scaled - wanted).abs().max()
    assert (scaled - wanted).abs().max() < 0.1 * wanted.std()


def test_8_bit_blocks_go_to_the_host_and_come_back_as_they_were() -> None:
    rank = loaded(replace(DUMMY, kv_cache_dtype="fp8", kv_checksum=True), num_host_blocks=4)
    logprobs_of(rank)
    cache = rank._kv_cache
    assert cache is not None
    before = cache[3].view(torch.uint8).clone()

    rank.launch(StepPlan(1, [], [], [], [], [], [], swap_out=[BlockCopy(3, 1, 5)]))
    rank.collect()
    cache[3].view(torch.uint8).zero_()
    rank.launch(StepPlan(2, [], [], [], [], [], [], swap_in=[BlockCopy(3, 1, 5)]))
    rank.collect()

    assert torch.equal(cache[3].view(torch.uint8), before)
    assert before.any()


def test_an_unknown_kind_of_cache_is_named() -> None:
    with pytest.raises(UserError, match="'int3' is unknown"):
        Rank(replace(DUMMY, kv_cache_dtype="int3"))
