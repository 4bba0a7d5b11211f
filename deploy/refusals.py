"""What pydantic refuses in settings and files, and how that is told: name, value and what is allowed, in one line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

_WITHOUT_VALUE = ("extra_forbidden", "missing", "json_invalid")
"""What is wrong is then not the value, or the input is the whole file."""


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
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    message = message[:1].lower() + message[1:]
    has_value = isinstance(first["input"], str | float | int | None) and first["type"] not in _WITHOUT_VALUE
    return f"{name} is {_shown(first['input'])}: {message}" if has_value else f"{name}: {message}"


def _shown(value: object) -> str:
    """A value as it was written: flags come as text, numbers among them."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return repr(value)
        return value
    return repr(value)
