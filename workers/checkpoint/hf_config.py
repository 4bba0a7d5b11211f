"""A Hugging Face folder's ``config.json`` as a ``ModelConfig``: what is peculiar to each family stands here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.checkpoint.config_values import integer, number, token_ids
from workers.checkpoint.generic_config import generic_config, is_decoder
from workers.checkpoint.model_shape import Experts, ModelConfig, RopeScaling
from workers.checkpoint.quantization import quantization_of
from workers.engine.errors import UserError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Hugging Face's architecture name to ours. SmolLM, Llama 2 and 3.x are ``LlamaForCausalLM``, Phi-4 is ``Phi3``."""
MODEL_IMPLS = ("auto", "native", "transformers")
"""Whose layers a model has: Shoal's, transformers', or Shoal's where there are such."""
_SERVED = (
    f"Shoal has layers of its own for {', '.join(FAMILIES)}, and runs any other decoder-only model of transformers "
    "that keeps keys and values alone with transformers' layers (--model-impl auto or transformers)"
)
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_PATTERN = {"gemma2": 2, "gemma3": 6}
"""One layer in so many attends to everything."""

JsonObject = Mapping[str, object]


def config_from_hf_folder(folder: Path, model_impl: str = "auto") -> ModelConfig:
    """Read ``config.json``, and ``generation_config.json`` for the end-of-sequence tokens where it exists.

    Args:
        folder: of the checkpoint.
        model_impl: one of ``MODEL_IMPLS``.

    Raises:
        UserError: the config is damaged, or describes a model that Shoal does not have.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise UserError(
            f"{folder}/config.json says architectures = {json.dumps(names)}, the class of the model is needed. "
            f"{_SERVED}",
            "model",
        )
    if model_impl == "transformers" or (model_impl == "auto" and name not in FAMILIES and is_decoder(name)):
        try:
            return generic_config(config, generation, str(folder))
        except UserError as error:
            raise UserError(f"{folder} holds a {name}: {error.message}. {_SERVED}", "model") from error
    if name not in FAMILIES:
        raise UserError(
            f"{folder} holds a {name}, which --model-impl {model_impl} has not. {_SERVED}", "model"
        )
    family = FAMILIES[str(name)]
    num_heads = integer(config, "num_attention_heads")
    hidden_size = integer(config, "hidden_size")
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    theta, scaling = _rope(config, folder)
    bos = config.get("bos_token_id")
    has_bias = bool(config.get("attention_bias"))
    is_gemma = family in _GEMMA_PATTERN
    return ModelConfig(
        architecture=family,
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size"),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=integer(config, "max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", is_gemma)),
        has_qkv_bias=family == "qwen2" or has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias")),
        has_qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        eos_token_ids=token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        bos_token_id=bos if isinstance(bos, int) else None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        quantization=quantization_of(config, str(folder)),
        activation=_activation(config, folder),
        windows=_windows(config, family),
        rope_kinds=_rope_kinds(config, family),
        local_rope_theta=_local_theta(config),
        rotary_dim=_rotary_dim(config, head_dim),
        query_scale=integer(config, "query_pre_attn_scalar", 256) ** -0.5 if is_gemma else None,
        attention_soft_cap=number(config, "attn_logit_softcapping", 0.0),
        logit_soft_cap=number(config, "final_logit_softcapping", 0.0),
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        has_offset_norms=is_gemma,
        has_post_norms=is_gemma,
        experts=_experts(config, family),
    )


def _activation(config: JsonObject, folder: Path) -> str:
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if name not in _ACTIVATIONS:
        raise UserError(f"{folder} uses activation {name!r}; Shoal has {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(name)]


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(config: JsonObject, family: str) -> list[str]:
    """By layer "sliding_attention" or "full_attention"."""
    num_layers = integer(config, "num_hidden_layers")
    given = config.get("layer_types")
    if isinstance(given, list) and given:
        unknown = sorted({str(kind) for kind in given} - set(_LAYER_TYPES))
        if unknown or len(given) != num_layers:
            found = ", ".join(unknown) or f"{len(given)} entries for {num_layers} layers"
            raise UserError(
                f"layer_types of config.json has {found}: it must give each layer one of {', '.join(_LAYER_TYPES)}",
                "model",
            )
        return [str(kind) for kind in given]
    if family in _GEMMA_PATTERN:
        pattern = integer(config, "sliding_window_pattern", _GEMMA_PATTERN[family])
        return [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        # Qwen's first layers attend to everything.
        first = integer(config, "max_window_layers", num_layers)
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    return ["sliding_attention"] * num_layers


def _windows(config: JsonObject, family: str) -> tuple[int, ...]:
    is_on = config.get("use_sliding_window", family not in ("qwen2", "qwen3", "qwen3_moe", "smollm3"))
    if not config.get("sliding_window") or not is_on:
        return ()
    window = integer(config, "sliding_window")
    kinds = _layer_types(config, family)
    if family == "qwen3_moe" and "layer_types" not in config:
        kinds = ["sliding_attention"] * len(kinds)
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _rope_kinds(config: JsonObject, family: str) -> tuple[str, ...]:
    num_layers = integer(config, "num_hidden_layers")
    if family == "gemma3":
        kinds = _layer_types(config, family)
        return tuple("local" if kind == "sliding_attention" else "global" for kind in kinds)
    if family == "smollm3":
        flags = config.get("no_rope_layers")
        if not isinstance(flags, list) or not flags:
            interval = integer(config, "no_rope_layer_interval", 4)
            flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        # The list's name notwithstanding, 1 says that a layer rotates.
        return tuple("global" if flag else "none" for flag in flags)
    return ()


def _local_theta(config: JsonObject) -> float:
    raw = config.get("rope_parameters")
    if isinstance(raw, dict) and isinstance(raw.get("sliding_attention"), dict):
        return number(raw["sliding_attention"], "rope_theta", 10000.0)
    return number(config, "rope_local_base_freq", 10000.0)


def _rotary_dim(config: JsonObject, head_dim: int) -> int | None:
    raw = config.get("rope_parameters")
    share = number(raw if isinstance(raw, dict) else {}, "partial_rotary_factor", 1.0)
    share = number(config, "partial_rotary_factor", share)
    return None if share == 1.0 else int(head_dim * share)


def _experts(config: JsonObject, family: str) -> Experts | None:
    if family == "mixtral":
        return Experts(
            integer(config, "num_local_experts", 8),
            integer(config, "num_experts_per_tok", 2),
            integer(config, "intermediate_size"),
            has_normed_weights=True,
        )
    if family != "qwen3_moe":
        return None
    step, given = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers")
    given = given if isinstance(given, list) else []
    num_layers = integer(config, "num_hidden_layers")
    return Experts(
        integer(config, "num_experts", integer(config, "num_local_experts", 128)),
        integer(config, "num_experts_per_tok", 8),
        integer(config, "moe_intermediate_size", 768),
        bool(config.get("norm_topk_prob", False)),
        tuple(layer for layer in range(num_layers) if layer in given or (layer + 1) % step),
    )


def _rope(config: JsonObject, folder: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or the older two fields."""
    raw: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise UserError(f"{folder}/config.json: the RoPE parameters are not an object")
    if isinstance(raw.get("full_attention"), dict):
        raw = raw["full_attention"]
    theta = number(raw, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = raw.get("rope_type", raw.get("type", "default"))
    longest = integer(config, "max_position_embeddings", 2048)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", number(raw, "factor", 1.0))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            number(raw, "factor", 1.0),
            number(raw, "low_freq_factor", 1.0),
            number(raw, "high_freq_factor", 4.0),
            integer(raw, "original_max_position_embeddings", 8192),
        )
    attention_factor = number(raw, "attention_factor", 0.0) or None
    if kind == "yarn":
        factor = number(raw, "factor", 1.0)
        return theta, RopeScaling(
            "yarn",
            factor,
            original_max_position_embeddings=integer(raw, "original_max_position_embeddings", longest),
            beta_fast=number(raw, "beta_fast", 32.0),
            beta_slow=number(raw, "beta_slow", 1.0),
            attention_factor=attention_factor,
        )
    if kind in ("longrope", "su"):
        original = integer(
            raw,
            "original_max_position_embeddings",
            integer(config, "original_max_position_embeddings", longest),
        )
        return theta, RopeScaling(
            "longrope",
            longest / original,
            original_max_position_embeddings=original,
            attention_factor=attention_factor,
            short_factors=tuple(float(value) for value in raw["short_factor"]),
            long_factors=tuple(float(value) for value in raw["long_factor"]),
        )
    raise UserError(
        f"{folder}: RoPE scaling {kind!r} is not supported; default, linear, llama3, yarn and longrope are"
    )


def _read_json(path: Path) -> JsonObject:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content
