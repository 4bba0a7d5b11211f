"""What pydantic refuses in settings and files, and how that is told: name, value and what is allowed, in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

_WITHOUT_VALUE = ("extra_forbidden", "missing", "json_invalid")
"""What is wrong is then not the value, or the input is the whole file."""
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_UNITS = {
    "gib_per_s": "GiB/s",
    "per_s": "a second",
    "s": "seconds",
    "hours": "hours",
    "gib": "GiB",
    "bytes": "bytes",
}
"""Of numbers, by the ends of their names."""
_WEEKS = (7 * 24 * 3600, 7 * 24)
_MOST_SHOWN = 80
"""Characters of a wrong value."""
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class Spec(BaseModel):
    """What a file says of one thing: no field is unknown, and no number infinite or a truth value."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, value: object, info: ValidationInfo) -> object:
        return no_truth_value(cls.model_fields[str(info.field_name)], value)


def no_truth_value(field: FieldInfo, value: object) -> object:
    """``value`` as it is; pydantic would take true, as YAML has it, for 1.

    Raises:
        ValueError: it is a truth value, and the field is no switch.
    """
    if isinstance(value, bool) and field.annotation is not bool:
        raise ValueError("true and false are no value of it, a number or a word is")
    return value


def refused_path(error: ValidationError) -> tuple[str, ...]:
    """Where the first wrong value stands; empty: in no single field."""
    return tuple(str(part) for part in error.errors(include_url=False)[0]["loc"])


def refusal(error: ValidationError, name: str) -> str:
    """The first thing that is wrong; ``name``: what the user calls the value, empty where it is no single one."""
    first = error.errors(include_url=False)[0]
    message = _message(first, name)
    if not name:
        return message
    message = message[:1].lower() + message[1:]
    has_value = isinstance(first["input"], str | float | int | None) and first["type"] not in _WITHOUT_VALUE
    return f"{name} is {_shown(first['input'])}: {message}" if has_value else f"{name}: {message}"


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def first_flag(message: str) -> str | None:
    """The setting whose flag a message names first; None: it names none."""
    found = _FLAG.search(message)
    return found.group()[2:].replace("-", "_") if found else None


def told_as_given(message: str, called: Mapping[str, str]) -> str:
    """``message`` with other words for the flags of settings that were not given by flag: ``called``, by setting."""

    def told(found: re.Match[str]) -> str:
        return called.get(found.group()[2:].replace("-", "_"), found.group())

    return _FLAG.sub(told, message)


def _message(error: Mapping[str, Any], name: str) -> str:
    """What is allowed; bounds with their unit, which pydantic does not know."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] not in _BOUNDS:
        return message
    number = _number(error["input"])
    if number is not None and not math.isfinite(number):
        return "input should be a finite number"
    words = name.lower().replace("-", "_")
    ends = ("gib" if words.endswith("swap_space") else words).split(".")[-1]
    unit = next((unit for end, unit in _UNITS.items() if f"_{ends}".endswith(f"_{end}")), "")
    (bound,) = error["ctx"].values()
    week = ", a week" if unit in ("seconds", "hours") and bound in _WEEKS else ""
    return f"{message} {unit}{week}".rstrip()


def _shown(value: object) -> str:
    """A value as it was written, its beginning where it is long: flags come as text, numbers among them."""
    text = value if isinstance(value, str) and _number(value) is not None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _number(value: object) -> float | None:
    """What a value is as a number; infinite where it is larger than any; None: it is none."""
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except OverflowError:
        return math.inf
    except ValueError:
        return None
