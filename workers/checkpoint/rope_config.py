"""What a Hugging Face config says of rotary positions: base, stretching, share of a head, in either of its two ages."""

from __future__ import annotations

import math
from typing import cast

from workers.checkpoint.config_values import Values, integer, number, positive_numbers
from workers.checkpoint.model_shape import RopeScaling
from workers.engine.errors import UserError

_KINDS = "default, linear, llama3, yarn and longrope"
_THETA = 10000.0
"""Where a config says nothing (Su et al. 2021, arXiv:2104.09864)."""


def rope_of(config: Values) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or the older two fields.

    Raises:
        UserError: an unknown kind, or a number of it is missing or impossible.
    """
    raw = _parameters(config)
    if isinstance(raw.get("full_attention"), dict):
        raw = cast("Values", raw["full_attention"])
    theta = number(raw, "rope_theta", number(config, "rope_theta", _THETA))
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", number(raw, "factor"))
    if kind == "llama3":
        return theta, _llama3(raw)
    if kind == "yarn":
        return theta, _yarn(raw, config)
    if kind in ("longrope", "su"):
        return theta, _longrope(raw, config)
    raise UserError(
        f"the model's config has RoPE scaling {kind!r}, which is not supported; {_KINDS} are", "model"
    )


def local_theta(config: Values) -> float:
    """The base of layers with a window, where they have one of their own."""
    raw = _parameters(config).get("sliding_attention")
    if isinstance(raw, dict):
        return number(raw, "rope_theta", _THETA)
    return number(config, "rope_local_base_freq", _THETA)


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
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    raw = config.get(key) or {}
    if not isinstance(raw, dict):
        raise UserError(f"the model's config has {key} = {raw!r}, it must be an object", "model")
    return raw


def _llama3(raw: Values) -> RopeScaling:
    low, high = number(raw, "low_freq_factor"), number(raw, "high_freq_factor")
    if low >= high:
        raise UserError(
            f"the model's config has low_freq_factor = {low:g} and high_freq_factor = {high:g}: the first must be "
            "lower",
            "model",
        )
    original = integer(raw, "original_max_position_embeddings")
    return RopeScaling("llama3", number(raw, "factor"), low, high, original)


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
    longest = integer(config, "max_position_embeddings", 2048)
    factor = number(raw, "factor")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=integer(raw, "original_max_position_embeddings", longest),
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
    longest = integer(config, "max_position_embeddings", 2048)
    original = integer(
        raw,
        "original_max_position_embeddings",
        integer(config, "original_max_position_embeddings", longest),
    )
    return RopeScaling(
        "longrope",
        longest / original,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(raw),
        short_factors=positive_numbers(raw, "short_factor"),
        long_factors=positive_numbers(raw, "long_factor"),
    )


def _attention_factor(raw: Values) -> float | None:
    return None if raw.get("attention_factor") is None else number(raw, "attention_factor")
