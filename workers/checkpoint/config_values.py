"""Reads single values of a model's config: which a key may have stands in one table, and errors name all three.

Keys are those of config.json and, behind them, of GGUF metadata for the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from workers.engine.errors import UserError

_MOST = 1 << 24
"""Of sizes without an entry below: 16,777,216, more than any model's context, width or vocabulary."""
_MOST_LAYERS = 10_000
_INTEGERS = {
    "num_hidden_layers": (1, _MOST_LAYERS),
    "block_count": (1, _MOST_LAYERS),
    "max_window_layers": (0, _MOST_LAYERS),
}
"""Least and most of integers that are no ordinary sizes."""
_NUMBERS = {
    # A base of 1 turns every pair at the same rate.
    "rope_theta": (1.0, math.inf),
    "rope.freq_base": (1.0, math.inf),
    "rope_local_base_freq": (1.0, math.inf),
    "rms_norm_eps": (0.0, 1.0),
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "low_freq_factor": (0.0, math.inf),
    "high_freq_factor": (0.0, math.inf),
    "beta_fast": (0.0, math.inf),
    "beta_slow": (0.0, math.inf),
    "attention_factor": (0.0, math.inf),
    "mscale": (0.0, math.inf),
    "mscale_all_dim": (0.0, math.inf),
    "partial_rotary_factor": (0.0, 1.0),
    "query_pre_attn_scalar": (0.0, math.inf),
}
"""Numbers lie above the first and, where it is finite, at most at the second."""
_NUMBERS_FROM = {
    "factor": 1.0,
    "rope.scaling.factor": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}
"""Numbers that may also be the bound itself."""

_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn")
"""Weights may be stored in."""

Values = Mapping[str, object]


def integer(values: Values, key: str, default: int | None = None) -> int:
    """An integer within its key's bounds, from 1 on without an entry; ``default`` where it is missing or null.

    Raises:
        UserError: it is something else, or missing without a default.
    """
    value = values.get(key)
    if value is None:
        value = default
    low, high = _INTEGERS.get(key, (1, _MOST))
    if type(value) is not int or not low <= value <= high:
        raise UserError(
            f"the model's config has {key} = {value!r}, it must be an integer from {low} to {high:,}", "model"
        )
    return value


def number(values: Values, key: str, default: float | None = None) -> float:
    """A finite number within its key's bounds; ``default`` (not checked) where it is missing or null.

    Raises:
        UserError: it is something else, or missing without a default.
    """
    value = values.get(key)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in _NUMBERS_FROM:
        low = _NUMBERS_FROM[key]
        wanted = f"{low:g} or more"
        is_within = is_number and low <= value < math.inf  # type: ignore[operator]
    else:
        low, high = _NUMBERS[key]
        wanted = f"above {low:g}" + (f", {high:g} at most" if high < math.inf else "")
        is_within = is_number and low < value <= high and value < math.inf  # type: ignore[operator]
    if not is_within:
        raise UserError(f"the model's config has {key} = {value!r}, it must be a number {wanted}", "model")
    return float(value)  # type: ignore[arg-type]


def flag(values: Values, key: str, default: bool = False) -> bool:
    """True or false; ``default`` where it is missing or null.

    Raises:
        UserError: it is something else.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"the model's config has {key} = {value!r}, it must be true or false", "model")
    return value


def stored_dtype(values: Values) -> str:
    """Name of what weights are stored in, from either key; "float32" where there is none.

    Raises:
        UserError: no such numbers.
    """
    value = values.get("dtype") or values.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        raise UserError(
            f"the model's config has dtype = {value!r}, it must be one of {', '.join(_DTYPES)}", "model"
        )
    return str(name)


def positive_numbers(values: Values, key: str) -> tuple[float, ...]:
    """A list of finite numbers above 0.

    Raises:
        UserError: it is something else, or missing.
    """
    value = values.get(key)
    if not isinstance(value, list) or not all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf for one in value
    ):
        raise UserError(
            f"the model's config has {key} = {_short(value)}, it must be a list of numbers above 0", "model"
        )
    return tuple(float(one) for one in value)


def entries(values: Values, key: str) -> list[object]:
    """A list; empty where it is missing or null.

    Raises:
        UserError: it is something else.
    """
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"the model's config has {key} = {_short(value)}, it must be a list", "model")
    return value


def token_ids(values: Values, key: str) -> tuple[int, ...]:
    """One token id, or a list of them, or none.

    Raises:
        UserError: it is something else.
    """
    value = values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in found):
        raise UserError(
            f"the model's config has {key} = {_short(value)}, it must be a token id or a list of token ids",
            "model",
        )
    return tuple(found)


def token_id(values: Values, key: str) -> int | None:
    """The first of ``token_ids``, or None."""
    return next(iter(token_ids(values, key)), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
