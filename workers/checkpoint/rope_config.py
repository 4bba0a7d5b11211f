"""What a Hugging Face config says of rotary positions: base, stretching, share of a head, in either of its two ages."""

from __future__ import annotations

import math

from workers.checkpoint.config_values import Values, integer, number, positive_numbers
from workers.checkpoint.model_shape import RopeScaling
from workers.engine.errors import UserError

_KINDS = "default, linear, llama3, yarn and longrope"
_LOCAL_THETA = 10000.0
"""Gemma 3's, where the config says nothing."""


def rope_of(config: Values, family: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of all layers but Gemma 3's local ones, from either age's fields.

    Raises:
        UserError: an unknown kind, or a number of it is missing or impossible.
    """
    raw = _parameters(config)
    if family == "gemma3":
        raw = {
            **_object(_object(config, "rope_parameters"), "full_attention"),
            **_object(config, "rope_scaling"),
        }
    elif any(isinstance(raw.get(layers), dict) for layers in ("full_attention", "sliding_attention")):
        raise UserError(
            f"the model's config has RoPE by kinds of layers, all layers of {family} models have the same",
            "model",
        )
    theta = number(raw, "rope_theta", number(config, "rope_theta"))
    if family == "phi3" and raw.get("rope_type", raw.get("type")) in ("su", "yarn"):
        # Names of longrope in the first Phi-3.
        return theta, _longrope(raw, config)
    return theta, _scaling(raw, config)


def local_rope_of(config: Values, family: str) -> tuple[float, RopeScaling | None]:
    """The same of layers with a window, where a family has a RoPE for them.

    Raises:
        UserError: as ``rope_of``.
    """
    if family != "gemma3":
        return _LOCAL_THETA, None
    raw = _object(_object(config, "rope_parameters"), "sliding_attention")
    return number(raw, "rope_theta", number(config, "rope_local_base_freq", _LOCAL_THETA)), _scaling(
        raw, config
    )


def rotary_dim(config: Values, family: str, head_dim: int) -> int | None:
    """How many of a head's numbers are rotated; None: all.

    Raises:
        UserError: a part, in a family whose heads are rotated whole.
    """
    share = number(config, "partial_rotary_factor", number(_parameters(config), "partial_rotary_factor", 1.0))
    if share != 1.0 and family != "phi3":
        raise UserError(
            f"the model's config has partial_rotary_factor = {share:g}: heads of {family} models are rotated whole, "
            "leave it out",
            "model",
        )
    return None if share == 1.0 else int(head_dim * share)


def _parameters(config: Values) -> Values:
    """What a config says of RoPE; of the two fields transformers heeds the older one, where there are both."""
    return _object(config, "rope_scaling") or _object(config, "rope_parameters")


def _object(values: Values, key: str) -> Values:
    raw = values.get(key) or {}
    if not isinstance(raw, dict):
        raise UserError(f"the model's config has {key} = {raw!r}, it must be an object", "model")
    return raw


def _scaling(raw: Values, config: Values) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number(raw, "factor"))
    if kind == "llama3":
        return _llama3(raw, config)
    if kind == "yarn":
        return _yarn(raw, config)
    if kind in ("longrope", "su"):
        return _longrope(raw, config)
    raise UserError(
        f"the model's config has RoPE scaling {kind!r}, which is not supported; {_KINDS} are", "model"
    )


def _llama3(raw: Values, config: Values) -> RopeScaling:
    low, high = number(raw, "low_freq_factor"), number(raw, "high_freq_factor")
    if low >= high:
        raise UserError(
            f"the model's config has low_freq_factor = {low:g} and high_freq_factor = {high:g}: the first must be "
            "lower",
            "model",
        )
    return RopeScaling("llama3", number(raw, "factor"), low, high, _original(raw, None, config))


def _yarn(raw: Values, config: Values) -> RopeScaling:
    fast, slow = number(raw, "beta_fast", 32.0), number(raw, "beta_slow", 1.0)
    if slow >= fast:
        raise UserError(
            f"the model's config has beta_slow = {slow:g} and beta_fast = {fast:g}: the first must be lower",
            "model",
        )
    if raw.get("truncate") not in (None, True):
        raise UserError(
            f"the model's config has truncate = {raw['truncate']!r} in its RoPE scaling: Shoal's YaRN has whole bounds "
            "only",
            "model",
        )
    factor = number(raw, "factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=_original(raw, integer(config, "max_position_embeddings"), config),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_yarn_attention_factor(raw, factor),
    )


def _yarn_attention_factor(raw: Values, factor: float) -> float | None:
    """What queries and keys are multiplied by; None: as the paper has it (Peng et al. 2023, arXiv:2309.00071, 3.4).

    DeepSeek's two exponents, where a config has both, say it as a quotient.
    """
    given = _attention_factor(raw)
    if given is not None or not (raw.get("mscale") and raw.get("mscale_all_dim")):
        return given
    scales = [0.1 * number(raw, key) * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim")]
    return scales[0] / scales[1]


def _longrope(raw: Values, config: Values) -> RopeScaling:
    longest = integer(config, "max_position_embeddings")
    original = _original(raw, longest, config)
    return RopeScaling(
        "longrope",
        number(raw, "factor", longest / original),
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(raw),
        short_factors=positive_numbers(raw, "short_factor"),
        long_factors=positive_numbers(raw, "long_factor"),
    )


def _original(raw: Values, default: int | None, config: Values) -> int:
    """Positions of pre-training: the config's own key goes before that of its RoPE scaling, as in transformers."""
    key = "original_max_position_embeddings"
    return integer(config if config.get(key) is not None else raw, key, default)


def _attention_factor(raw: Values) -> float | None:
    return None if raw.get("attention_factor") is None else number(raw, "attention_factor")
