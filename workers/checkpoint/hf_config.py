"""A Hugging Face folder's ``config.json`` as a ``ModelConfig``: what is peculiar to each family stands here."""

from __future__ import annotations

import json
from pathlib import Path

from workers.checkpoint.config_values import (
    Values,
    entries,
    flag,
    integer,
    number,
    stored_dtype,
    token_id,
    token_ids,
)
from workers.checkpoint.family_keys import family_values
from workers.checkpoint.generic_config import generic_config, is_decoder
from workers.checkpoint.model_shape import Experts, ModelConfig
from workers.checkpoint.quantization import quantization_of
from workers.checkpoint.rope_config import local_rope_of, rope_of, rotary_dim
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
_GEMMA2_PATTERN = 2
"""One layer in so many attends to everything; Gemma 3's configs say it themselves."""


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
    config = family_values(config, family)
    if flag(config, "use_bidirectional_attention"):
        raise UserError(
            "the model's config has use_bidirectional_attention = true: Shoal generates, and lets tokens see those "
            "before them alone",
            "model",
        )
    num_heads = integer(config, "num_attention_heads")
    hidden_size = integer(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UserError(
            f"the model's config has hidden_size = {hidden_size} and num_attention_heads = {num_heads}: without "
            "head_dim the first must be a multiple of the second",
            "model",
        )
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    theta, scaling = rope_of(config, family)
    local_theta, local_scaling = local_rope_of(config, family)
    has_bias = flag(config, "attention_bias")
    is_gemma = family in ("gemma2", "gemma3")
    return ModelConfig(
        architecture=family,
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size"),
        rms_norm_eps=number(config, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=integer(config, "max_position_embeddings"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        has_qkv_bias=family == "qwen2" or has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=flag(config, "mlp_bias"),
        has_qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        eos_token_ids=token_ids(generation if "eos_token_id" in generation else config, "eos_token_id"),
        bos_token_id=token_id(config, "bos_token_id"),
        dtype=stored_dtype(config),
        quantization=quantization_of(config, str(folder)),
        activation=_activation(config, folder),
        windows=_windows(config, family),
        rope_kinds=_rope_kinds(config, family),
        local_rope_theta=local_theta,
        local_rope_scaling=local_scaling,
        rotary_dim=rotary_dim(config, family, head_dim),
        query_scale=number(config, "query_pre_attn_scalar") ** -0.5 if is_gemma else None,
        attention_soft_cap=number(config, "attn_logit_softcapping", 0.0),
        logit_soft_cap=number(config, "final_logit_softcapping", 0.0),
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        has_offset_norms=is_gemma,
        has_post_norms=is_gemma,
        experts=_experts(config, family),
    )


def _activation(config: Values, folder: Path) -> str:
    name = config["hidden_activation" if "hidden_activation" in config else "hidden_act"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UserError(f"{folder} uses activation {name!r}; Shoal has {', '.join(_ACTIVATIONS)}", "model")
    return _ACTIVATIONS[name]


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_types(config: Values, family: str) -> list[str]:
    """By layer "sliding_attention" or "full_attention"."""
    num_layers = integer(config, "num_hidden_layers")
    if given := entries(config, "layer_types"):
        unknown = sorted({str(kind) for kind in given} - set(_LAYER_TYPES))
        if unknown or len(given) != num_layers:
            found = ", ".join(unknown) or f"{len(given)} entries for {num_layers} layers"
            raise UserError(
                f"layer_types of config.json has {found}: it must give each layer one of {', '.join(_LAYER_TYPES)}",
                "model",
            )
        return [str(kind) for kind in given]
    if family in ("gemma2", "gemma3"):
        pattern = integer(config, "sliding_window_pattern", _GEMMA2_PATTERN)
        return [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(num_layers)
        ]
    if family in ("qwen2", "qwen3"):
        # Qwen's first layers attend to everything.
        first = integer(config, "max_window_layers")
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if family == "smollm3":
        return [
            "full_attention" if has_rope else "sliding_attention"
            for has_rope in _rope_flags(config, num_layers)
        ]
    return ["sliding_attention"] * num_layers


def _windows(config: Values, family: str) -> tuple[int, ...]:
    if config.get("sliding_window") is None or not flag(config, "use_sliding_window", True):
        return ()
    window = integer(config, "sliding_window")
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in _layer_types(config, family))
    return windows if any(windows) else ()


def _rope_kinds(config: Values, family: str) -> tuple[str, ...]:
    num_layers = integer(config, "num_hidden_layers")
    if family == "gemma3":
        kinds = _layer_types(config, family)
        return tuple("local" if kind == "sliding_attention" else "global" for kind in kinds)
    if family == "smollm3":
        return tuple("global" if has_rope else "none" for has_rope in _rope_flags(config, num_layers))
    return ()


def _rope_flags(config: Values, num_layers: int) -> list[bool]:
    """By layer whether it rotates; ``no_rope_layers``, its name notwithstanding, has 1 where it does."""
    if given := entries(config, "no_rope_layers"):
        return [bool(one) for one in given]
    interval = integer(config, "no_rope_layer_interval")
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _experts(config: Values, family: str) -> Experts | None:
    if family == "mixtral":
        return Experts(
            integer(config, "num_local_experts"),
            integer(config, "num_experts_per_tok"),
            integer(config, "intermediate_size"),
            has_normed_weights=True,
        )
    if family != "qwen3_moe":
        return None
    step, given = integer(config, "decoder_sparse_step"), entries(config, "mlp_only_layers")
    num_layers = integer(config, "num_hidden_layers")
    return Experts(
        integer(config, "num_local_experts"),
        integer(config, "num_experts_per_tok"),
        integer(config, "moe_intermediate_size"),
        flag(config, "norm_topk_prob"),
        tuple(layer for layer in range(num_layers) if layer in given or (layer + 1) % step),
    )


def _read_json(path: Path) -> Values:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", "model") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "model") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "model") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object", "model")
    return content
