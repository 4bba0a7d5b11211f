"""Each family computes what transformers computes, on tiny random models in a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from workers.checkpoint.family_keys import FAMILY_KEYS
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama 3.1 rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "yarn with two exponents": (
        "LlamaConfig",
        {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "mistral with a window": ("MistralConfig", {"sliding_window": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 24, "layer_types": GEMMA_LAYERS}),
    "gemma3 scaled": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 24, "layer_types": GEMMA_LAYERS, "rope_parameters": GEMMA_ROPE},
    ),
    "gemma3 with local layers stretched": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": GEMMA_LAYERS,
            "rope_parameters": {
                "sliding_attention": YARN_ROPE | {"rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 1, "sliding_window": 30}),
    "longrope of phi4 mini": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "eos_token_id": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 10 for i in range(6)],
                "long_factor": [1.5 + i for i in range(6)],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "longrope with a factor": ("LlamaConfig", {"rope_parameters": LONGROPE | {"factor": 8.0}}),
    "smollm3": (
        "SmolLM3Config",
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "no_rope_layers": [1, 0, 1]},
    ),
}


def save_model(
    folder: Path,
    config_name: str,
    fields: dict,
    shard_bytes: str = "5GB",
    sizes: Mapping[str, object] = SHAPE,
) -> torch.nn.Module:
    """Write a random model as transformers would and return it."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**sizes, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return model


def next_logprobs(rank: Rank, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token over the whole vocabulary."""
    params = ChoiceParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB)
    row, blocks = NewRow(0, token_ids, len(token_ids), params), list(range(-(-len(token_ids) // 16)))
    rank.launch(StepPlan(0, [row], [0], [0], [len(token_ids)], [True], [blocks]))
    (found,) = rank.collect().logprobs
    ordered = torch.empty(VOCAB)
    ordered[found.top_token_ids] = torch.tensor(found.top_logprobs)
    return ordered


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_computes(
    family: str, make_rank, ragged_logprobs, tmp_path: Path
) -> None:
    model = save_model(tmp_path, *FAMILIES[family])
    rank = make_rank(files=ModelFiles(tmp_path, family))
    # transformers chooses longrope's factors by a sequence's length, Shoal by the longest it serves.
    lengths = (100, 70, 81) if "longrope" in family else (100, 1, 34, 63)
    prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in lengths]

    with torch.inference_mode():
        wanted = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]

    # Whole prompts beside each other; then chunks over cached ones, decodes among them.
    for chunk in (100, 33):
        for got, want in zip(ragged_logprobs(rank, prompts, chunk), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


SIZES = {**SHAPE, "num_attention_heads": 8, "hidden_size": 128, "eos_token_id": 2}
BRIEF = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {}),
    "mixtral": ("MixtralConfig", {}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2}),
    "qwen3 moe": ("Qwen3MoeConfig", {"num_experts": 16}),
    "gemma2": ("Gemma2Config", {}),
    "gemma3": ("Gemma3TextConfig", {}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "smollm3": ("SmolLM3Config", {"pad_token_id": 0, "bos_token_id": 1}),
    "qwen2 with a window": (
        "Qwen2Config",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 24, "num_hidden_layers": 30},
    ),
    "smollm3 with a window": (
        "SmolLM3Config",
        {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "use_sliding_window": True,
            "sliding_window": 24,
            "num_hidden_layers": 4,
        },
    ),
}
"""What a config cannot do without, by family; two with windows whose layers it does not list."""
STRANGE = {
    "sliding_window": 24,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window_pattern": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "query_pre_attn_scalar": 5,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "no_rope_layers": [0, 0, 1],
    "rope_local_base_freq": 99.0,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
"""Keys that some family looks at, each with a value that changes what it computes."""


@pytest.mark.parametrize("family", BRIEF)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    family: str, make_rank, ragged_logprobs, tmp_path: Path
) -> None:
    config_name, needed = BRIEF[family]
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | needed
    model = save_model(tmp_path, config_name, sizes, sizes={})
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": saved["architectures"]}))

    _check_logprobs(model, make_rank(files=ModelFiles(tmp_path, family)), ragged_logprobs)


@pytest.mark.parametrize("family", list(BRIEF)[:10])
def test_keys_of_other_families_are_passed_over_as_transformers_does(
    family: str, make_rank, ragged_logprobs, tmp_path: Path
) -> None:
    config_name, needed = BRIEF[family]
    model = save_model(tmp_path, config_name, SIZES | needed)
    config = json.loads((tmp_path / "config.json").read_text())
    own = FAMILY_KEYS[family.replace(" ", "_")]
    strange = {key: value for key, value in STRANGE.items() if key not in own}
    (tmp_path / "config.json").write_text(json.dumps(config | strange))
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()

    _check_logprobs(model, make_rank(files=ModelFiles(tmp_path, family)), ragged_logprobs)


def _check_logprobs(model: torch.nn.Module, rank: Rank, ragged_logprobs) -> None:
    prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in (100, 7)]
    with torch.inference_mode():
        wanted = [
            model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1) for ids in prompts
        ]

    for got, want in zip(ragged_logprobs(rank, prompts, 100), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_weights_in_several_files_are_found(make_rank, tmp_path: Path) -> None:
    save_model(tmp_path / "one", "LlamaConfig", {})
    save_model(tmp_path / "many", "LlamaConfig", {}, shard_bytes="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1

    one, many = (
        next_logprobs(make_rank(files=ModelFiles(tmp_path / name, name)), [1, 2, 3])
        for name in ("one", "many")
    )

    torch.testing.assert_close(one, many, rtol=0, atol=0)


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "LlamaConfig", {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(UserError, match="pickled"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()


def test_weights_that_contradict_the_config_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "LlamaConfig", {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 95}))

    with pytest.raises(UserError, match=r"gate_proj.*\(96, 64\).*\(95, 64\)"):
        Rank(RankConfig(files=ModelFiles(tmp_path, "x"))).load()
