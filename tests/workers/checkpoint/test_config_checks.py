"""A config.json with a value that cannot be right is refused by key, value and what is allowed."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "eos_token_id": 2, "bos_token_id": 1, "dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 16,
    "quantization_config": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 1e5}},
    "longrope": {"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
    "compressed": {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        }
    },
    "transformers": {"architectures": ["GraniteForCausalLM"]},
}  # fmt: skip


def write(folder: Path, *changes: dict[str, object]) -> ModelFiles:
    """A folder with a small Llama's config.json, changed."""
    config = dict(LLAMA)
    for change in changes:
        config |= change
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles(folder, "x")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_config_is_read(tmp_path: Path, family: str) -> None:
    assert read_model_config(write(tmp_path, FAMILIES[family])).num_layers == 2


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("rope_theta", -1, "above 1"),
        ("rope_theta", 0, "above 1"),
        ("rope_theta", math.nan, "above 1"),
        ("rope_theta", math.inf, "above 1"),
        ("rope_theta", "1e4", "above 1"),
        ("max_position_embeddings", 10**12, "from 1 to 16,777,216"),
        ("max_position_embeddings", 1e12, "from 1 to 16,777,216"),
        ("head_dim", 15, "both must be even"),
        ("head_dim", 0, "from 1 to"),
        ("head_dim", None, ""),
        ("num_hidden_layers", 0, "from 1 to 10,000"),
        ("num_hidden_layers", 10**9, "from 1 to 10,000"),
        ("hidden_size", -64, "from 1 to"),
        ("intermediate_size", 0, "from 1 to"),
        ("num_key_value_heads", -2, "from 1 to"),
        ("vocab_size", 0, "from 1 to"),
        ("vocab_size", True, "from 1 to"),
        ("rms_norm_eps", 0, "above 0, 1 at most"),
        ("rms_norm_eps", -1e-5, "above 0, 1 at most"),
        ("eos_token_id", 100, "from 0 to 99"),
        ("eos_token_id", [2, 5000], "from 0 to 99"),
        ("eos_token_id", -1, "a token id or a list of token ids"),
        ("eos_token_id", ["</s>"], "a token id or a list of token ids"),
        ("eos_token_id", "2", "a token id or a list of token ids"),
        ("tie_word_embeddings", "false", "true or false"),
        ("dtype", "bf16", "float32, bfloat16"),
        ("hidden_act", ["silu"], "silu"),
    ],
)
def test_a_value_that_cannot_be_right_is_named_with_what_can(
    tmp_path: Path, key: str, value: object, allowed: str
) -> None:
    files = write(tmp_path, {key: value})
    if value is None:
        assert read_model_config(files).head_dim == 16
        return

    with pytest.raises(UserError) as caught:
        read_model_config(files)

    assert caught.value.param == "model"
    assert allowed in caught.value.message
    assert (key if key != "hidden_act" else "activation") in caught.value.message


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (LLAMA3 | {"factor": 0}, "factor = 0, it must be a number 1 or more"),
        (LLAMA3 | {"factor": None}, "factor = None"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor = None"),
        (
            LLAMA3 | {"high_freq_factor": 1.0},
            "low_freq_factor = 1 and high_freq_factor = 1: the first must be lower",
        ),
        (LLAMA3 | {"original_max_position_embeddings": None}, "original_max_position_embeddings = None"),
        ({"rope_type": "linear"}, "factor = None"),
        ({"type": "linear", "factor": -2}, "factor = -2"),
        (YARN | {"factor": "4"}, "factor = '4'"),
        (YARN | {"beta_slow": 40}, "beta_slow = 40 and beta_fast = 32"),
        (YARN | {"attention_factor": 0}, "attention_factor = 0"),
        (YARN | {"truncate": False}, "truncate = False"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5: heads of llama models are rotated whole",
        ),
        (LONGROPE | {"short_factor": None}, "short_factor = None"),
        (LONGROPE | {"long_factor": [1.0] * 7}, "7 numbers in long_factor: it must have one for each of 8"),
        (LONGROPE | {"long_factor": [0.0] * 8}, "long_factor = .0.0"),
        ({"rope_type": "dynamic", "factor": 2}, "'dynamic'.*default, linear, llama3, yarn and longrope"),
        ({"rope_type": ["linear"]}, "not supported"),
        ([1], "rope_scaling = .1., it must be an object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_stretching_with_a_part_missing_or_impossible_is_refused(
    tmp_path: Path, scaling: object, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        read_model_config(write(tmp_path, {"rope_scaling": scaling}))


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_the_first_phi3s_names_of_longrope_are_known(tmp_path: Path, name: str) -> None:
    scaling = LONGROPE | {"rope_type": name, "original_max_position_embeddings": 32}

    read = read_model_config(
        write(
            tmp_path, FAMILIES["longrope"], {"rope_scaling": scaling, "original_max_position_embeddings": 64}
        )
    ).rope_scaling

    assert read is not None
    assert (read.kind, read.factor, read.original_max_position_embeddings) == ("longrope", 2.0, 64)


def test_the_older_field_goes_before_the_newer_one(tmp_path: Path) -> None:
    files = write(
        tmp_path, {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    )

    scaling = read_model_config(files).rope_scaling

    assert scaling is not None
    assert scaling.kind == "llama3"


def test_rope_by_kinds_of_layers_is_refused_where_all_layers_have_the_same(tmp_path: Path) -> None:
    by_kind = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}

    with pytest.raises(UserError, match="RoPE by kinds of layers, all layers of qwen2 models have the same"):
        read_model_config(write(tmp_path, FAMILIES["qwen2"], {"rope_parameters": by_kind}))


def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use_bidirectional_attention = true"):
        read_model_config(write(tmp_path, FAMILIES["gemma3"] | {"use_bidirectional_attention": True}))


def test_widths_that_heads_do_not_divide_need_the_width_of_a_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hidden_size = 64 and num_attention_heads = 6: without head_dim"):
        read_model_config(write(tmp_path, {"num_attention_heads": 6, "head_dim": None}))


WRONG = [
    None, "x", "", -1, 0, 1, 0.5, -0.5, True, 10**15, math.nan, math.inf, [], [None], [[1]], ["x", "x"], {}, {"x": 1},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_any_key_ends_in_another_error(tmp_path: Path, family: str) -> None:
    config = LLAMA | FAMILIES[family]
    inner = {"rope_scaling", "rope_parameters", "quantization_config"}
    for key, value in config.items():
        for wrong in WRONG:
            _read(write(tmp_path, config, {key: wrong}))
        for part in value if key in inner and isinstance(value, dict) else ():
            for wrong in WRONG:
                _read(write(tmp_path, config, {key: {**value, part: wrong}}))


def _read(files: ModelFiles) -> None:
    """Read the config, or be told what is wrong with it; whatever else is raised fails the test."""
    with contextlib.suppress(UserError):
        read_model_config(files)
