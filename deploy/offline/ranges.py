"""Numbers that offline callers give: of the right kind and within their range, or refused by name.

Truth values are no numbers here, though Python counts with them; those of other libraries, numpy's say, are.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

from workers.engine.errors import InvalidRequest


def is_integer(value: object) -> bool:
    """True for an integer of any library."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_flag(name: str, value: bool) -> None:
    """Return if ``value`` is true or false, and nothing else that Python would count as either.

    Raises:
        InvalidRequest: it is not; the message has name and value.
    """
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}, it must be true or false", name)


def check_integer(name: str, value: int, low: float, high: float) -> None:
    """Return if ``value`` is an integer from ``low`` to ``high``.

    Raises:
        InvalidRequest: it is not; the message has name, value and range.
    """
    if not is_integer(value) or not low <= value <= high:
        limit = f"{low} or more" if high == math.inf else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {value!r}, it must be an integer, {limit}", name)


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Return if ``value`` is a number from ``low`` to ``high``; NaN is none.

    Raises:
        InvalidRequest: it is not; the message has name, value and range.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}, it must be from {low} to {high}", name)
