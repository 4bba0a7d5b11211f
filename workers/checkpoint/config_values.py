"""Reads single values of a model's config, with errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engine.errors import UserError


def integer(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A positive integer; ``default`` where it is missing or null."""
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"the model's config has {key} = {value!r}, a positive integer is needed")
    return value


def number(values: Mapping[str, object], key: str, default: float) -> float:
    """Any number; ``default`` where it is missing or null."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"the model's config has {key} = {value!r}, a number is needed")
    return float(value)


def token_ids(value: object) -> tuple[int, ...]:
    """One token id, or a list of them, or none."""
    if value is None:
        return ()
    found = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in found if isinstance(token_id, int))
