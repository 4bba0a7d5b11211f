"""Every number that can be given has bounds within which the arithmetic behind it is finite."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from deploy.commands import app
from deploy.refusals import Spec
from deploy.settings import ServeSettings, make_settings
from deploy.simulate.replica_model import ReplicaModel
from tests.deploy.test_command_group import numbers_of
from tests.deploy.test_durations import specs
from workers.engine.errors import InvalidRequest

NUMBERS: dict[str, object] = {
    "huge": 1e300,
    "huge word": "1e300",
    "larger than any float": 10**400,
    "larger than any float, a word": "1" + "0" * 400,
    "tiny": 1e-300,
    "below zero": -1e300,
    "subnormal": 5e-324,
    "no number": float("nan"),
    "infinite": "inf",
}


def is_number(field: FieldInfo) -> bool:
    kinds = {field.annotation, *get_args(field.annotation)}
    kinds |= {get_args(kind)[0] for kind in kinds if get_args(kind)}  # of Annotated in a union
    return bool({int, float} & kinds) and "Literal" not in str(field.annotation)


def bounds(field: FieldInfo) -> tuple[float, float]:
    kinds = [one for one in get_args(field.annotation) if get_args(one)]
    marks = [*field.metadata, *(mark for kind in kinds for mark in get_args(kind)[1:])]
    found: list[Any] = [*marks, *(one for mark in marks for one in getattr(mark, "metadata", []))]
    lower = [one.ge if isinstance(one, Ge) else one.gt for one in found if isinstance(one, Ge | Gt)]
    upper = [one.le if isinstance(one, Le) else one.lt for one in found if isinstance(one, Le | Lt)]
    return max(map(float, lower)), min(map(float, upper))


FIELDS = [
    (kind, name)
    for kind in (ServeSettings, *specs(Spec))
    for name, field in kind.model_fields.items()
    if is_number(field)
]


def use(settings: object) -> None:
    """Compute what is made of settings before anything starts."""
    if isinstance(settings, ServeSettings):
        pickle.dumps(settings.replica_config("path", "name"))
        assert settings.scale_bounds is None or settings.scale_bounds.serve_options()
        assert settings.observability
    elif isinstance(settings, ReplicaModel):
        pickle.dumps((settings.cost(512), settings.engine_config(16)))


def test_numbers_are_found_wherever_they_can_be_given() -> None:
    names = {name for _, name in FIELDS}

    assert {"swap_space", "kv_cache_gib", "copy_gib_per_s", "num_cpus", "max_replicas", "run_ahead"} <= names
    assert len(FIELDS) > 50


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_number_has_bounds_at_which_all_that_is_made_of_it_can_be_computed(
    kind: type[BaseModel], name: str
) -> None:
    lower, upper = bounds(kind.model_fields[name])
    beside = {"max_replicas": 1024} if "max_replicas" in kind.model_fields else {}
    beside |= {"name": "a"} if "name" in kind.model_fields else {}

    for value in (lower, upper, 5e-324):
        number = int(value) if value == int(value) else value
        with suppress(ValidationError):
            use(kind.model_validate({**beside, name: number}))


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("name", [name for kind, name in FIELDS if kind is ServeSettings])
def test_an_extreme_number_makes_settings_or_is_refused(name: str, value: Any) -> None:
    with suppress(InvalidRequest):
        use(make_settings(**{name: value}))


OPTIONS = [
    (command, flag, option.max)
    for command, flag, option in numbers_of(app)
    if float in (option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation))
]


@pytest.mark.parametrize(("command", "flag", "most"), OPTIONS)
@pytest.mark.parametrize("value", ["1e300", "nan", "inf"])
def test_an_option_that_is_no_integer_has_a_bound_that_is_told(
    command: tuple[str, ...], flag: str, most: float | None, value: str
) -> None:
    assert most is not None

    result = CliRunner().invoke(app, [*command, flag, value])

    assert isinstance(result.exception, InvalidRequest), result.output
    says = "less than or equal to" if value == "1e300" else "input should be a finite number"
    assert str(result.exception).startswith(f"{flag} is {value}")
    assert says in str(result.exception)
