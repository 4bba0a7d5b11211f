"""What a family takes where config.json says nothing is what transformers' own class takes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import transformers

from workers.checkpoint.family_keys import ALIASES, FAMILY_KEYS

CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "smollm3": "SmolLM3Config",
}
WITHOUT_A_FIELD = {
    # Layers ask for it all the same.
    "head_dim": None,
    # AutoConfig looks for it in a Mistral's config.
    "layer_types": None,
    "sliding_window_pattern": 6,
}
PASSED_OVER = {"gemma3": {"attn_logit_softcapping"}}
"""Fields that the family's layers do not look at."""


def transformers_defaults(family: str) -> dict[str, Any]:
    """Defaults of the class, RoPE's included, by the names in config.json."""
    cls = getattr(transformers, CLASSES[family])
    found: dict[str, Any] = {field.name: field.default for field in fields(cls)}
    found |= {ours: found[theirs] for theirs, ours in ALIASES.items() if theirs in found}
    theta = cls.default_theta
    if isinstance(theta, dict):
        return found | {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]}
    return found | {"rope_theta": theta}


@pytest.mark.parametrize("family", FAMILY_KEYS)
def test_a_key_left_out_means_what_it_means_to_transformers(family: str) -> None:
    theirs = WITHOUT_A_FIELD | transformers_defaults(family)

    for key, value in FAMILY_KEYS[family].items():
        # None and False are the same to a flag.
        assert theirs[key] == value or (not theirs[key] and value is False), key


@pytest.mark.parametrize("family", FAMILY_KEYS)
def test_a_family_has_all_keys_of_its_class_that_any_family_looks_at(family: str) -> None:
    looked_at = {key for keys in FAMILY_KEYS.values() for key in keys}

    missing = looked_at & transformers_defaults(family).keys() - FAMILY_KEYS[family].keys()

    assert missing == PASSED_OVER.get(family, set())
