"""Which keys of config.json each family looks at, and what it takes where one is left out: transformers' own defaults.

Sizes of a model have no defaults here: a config without its ``hidden_size`` is damaged, not brief.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from workers.checkpoint.config_values import Values

_EVERY: dict[str, object] = {
    "hidden_act": "silu",
    "head_dim": None,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
"""None: there is none, or it follows from others."""
_QWEN: dict[str, object] = _EVERY | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_LAYERED_QWEN: dict[str, object] = _QWEN | {
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_MISTRAL: dict[str, object] = _EVERY | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}
_GEMMA: dict[str, object] = {key: value for key, value in _EVERY.items() if key != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "eos_token_id": 1,
}
FAMILY_KEYS: Mapping[str, Values] = MappingProxyType(
    {
        "llama": _EVERY
        | {
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": 2,
        },
        # Given layer_types, transformers takes a Mistral for a Ministral.
        "mistral": _MISTRAL | {"layer_types": None},
        "mixtral": _MISTRAL
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "qwen2": _LAYERED_QWEN,
        "qwen3": _LAYERED_QWEN | {"head_dim": 128, "attention_bias": False},
        "qwen3_moe": _QWEN
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        "gemma2": _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        # Its class has attn_logit_softcapping as well, and its layers do not look at it.
        "gemma3": _GEMMA
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        "phi3": _EVERY
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        "smollm3": _EVERY
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
        },
    }
)
"""By family: every key with a default, and that."""
ALIASES = MappingProxyType({"num_experts": "num_local_experts"})
"""Names that transformers takes for others, in families that have the other."""
_ELSEWHERE = frozenset(key for keys in FAMILY_KEYS.values() for key in keys) - {
    # transformers looks at it in any config that has it.
    "original_max_position_embeddings",
}


_NULLS = (
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "num_key_value_heads",
)
"""Keys in which null says something; elsewhere it is as good as a key left out."""


def family_values(config: Values, family: str) -> Values:
    """What the family's class in transformers reads of ``config``: with defaults, without other families' keys."""
    known = FAMILY_KEYS[family]
    named = {ALIASES[key] if ALIASES.get(key) in known else key: value for key, value in config.items()}
    given = {key: value for key, value in named.items() if value is not None or key in _NULLS}
    return {**known, **{key: value for key, value in given.items() if key in known or key not in _ELSEWHERE}}
