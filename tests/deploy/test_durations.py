"""Every duration that a user can give has a limit: what no clock or socket takes is refused before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from deploy import drain_node, smoke_test
from deploy.cluster_spec import ScaleEntry
from deploy.commands import app
from deploy.durations import MOST_S
from deploy.ingress_spec import IngressSpec
from deploy.refusals import Spec, refusal
from deploy.settings import ServeSettings, make_settings
from deploy.simulate.replica_model import ReplicaModel
from tests.deploy.test_command_group import numbers_of
from workers.engine.errors import InvalidRequest


def is_duration(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def specs(kind: type[Spec] = Spec) -> list[type[Spec]]:
    """All that files may hold."""
    return [found for one in kind.__subclasses__() for found in (one, *specs(one))]


FIELDS = [
    (kind, name) for kind in (ServeSettings, *specs()) for name in kind.model_fields if is_duration(name)
]
OPTIONS = [
    (command, flag)
    for command, flag, option in numbers_of(app)
    if is_duration(str(option.name)) or option.name == "hours"
]


def test_durations_are_found_wherever_they_can_be_given() -> None:
    kinds = {kind for kind, _ in FIELDS}

    assert {ServeSettings, ScaleEntry, IngressSpec, ReplicaModel} <= kinds
    assert (("deploy",), "--wait-s") in OPTIONS
    assert (("bench", "soak"), "--duration-s") in OPTIONS


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_refuses_what_is_longer_than_a_week(kind: type[BaseModel], name: str) -> None:
    given = {"max_replicas": 2} if "max_replicas" in kind.model_fields else {}
    for value in (1e300, MOST_S + 1):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate({name: value, **given})

        assert refusal(refused.value, name) == (
            f"{name} is {value!r}: input should be less than or equal to {MOST_S:.0f} seconds, a week"
        )
    assert kind.model_validate({name: MOST_S, **given})


@pytest.mark.parametrize(("command", "flag"), OPTIONS)
@pytest.mark.parametrize("value", ["1e300", "nan"])
def test_an_option_refuses_what_cannot_be_waited(command: tuple[str, ...], flag: str, value: str) -> None:
    most = MOST_S / 3600 if flag == "--hours" else MOST_S
    result = CliRunner().invoke(app, [*command, flag, value])

    assert isinstance(result.exception, InvalidRequest), result.output
    assert str(result.exception).startswith(f"{flag} is {value}")
    if value == "nan":
        assert "finite" in str(result.exception)
    else:
        unit = "hours" if flag == "--hours" else "seconds"
        assert str(result.exception).endswith(f"less than or equal to {most:.0f} {unit}, a week")


def test_a_flag_of_the_server_is_told_with_its_limit() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^--drain-timeout-s is 1e300: .* equal to 604800 seconds, a week$"
    ):
        make_settings(drain_timeout_s="1e300")


@pytest.mark.parametrize(
    ("main", "given"),
    [
        (drain_node.main, ["--timeout-s"]),
        (drain_node.main, ["--timeout-s", "1", "--settle-s"]),
        (smoke_test.main, ["--url", "http://127.0.0.1:1", "--wait-s"]),
    ],
)
@pytest.mark.parametrize("value", ["1e300", "nan", "-1", "soon", ""])
def test_what_a_pod_runs_refuses_them_too(
    main: Callable[[], object],
    given: list[str],
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *given[:-1], f"{given[-1]}={value}"])

    with pytest.raises(SystemExit) as end:
        main()

    assert end.value.code == 2
    assert (
        f"argument {given[-1]}: {value!r} is no number of seconds from 0 to 604800" in capsys.readouterr().err
    )
