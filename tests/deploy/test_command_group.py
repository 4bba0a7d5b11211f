"""A number that a command cannot take is told in one line: the flag, what was given, and what is allowed."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
import typer.main
from typer.testing import CliRunner

from deploy.commands import app
from workers.engine.errors import InvalidRequest


def numbers_of(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Every option that the parser itself takes as a number, with its command and its description."""
    for one in group.registered_groups:
        assert one.typer_instance is not None, "a group has commands"
        yield from numbers_of(one.typer_instance, (*path, str(one.name)))
    parsers = typer.main.get_group(group).commands
    for name, parser in parsers.items():
        assert parser.callback is not None or hasattr(parser, "commands"), "a command does something"
        hints = get_type_hints(parser.callback) if parser.callback is not None else {}
        for option in parser.params:
            hint = hints.get(str(option.name))
            kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            if {int, float} & set(kinds) and option.param_type_name == "option":
                yield (*path, name), max(option.opts, key=len), option


NUMBERS = [(command, flag) for command, flag, _ in numbers_of(app)]


@pytest.mark.parametrize(("command", "flag"), NUMBERS)
def test_a_word_for_a_number_is_told_with_its_flag(command: tuple[str, ...], flag: str) -> None:
    result = CliRunner().invoke(app, [*command, flag, "many"])

    assert isinstance(result.exception, InvalidRequest), result.output
    assert str(result.exception).startswith(f"{flag} is 'many': input should be a valid ")


def test_a_number_beyond_its_bound_and_a_word_that_is_no_choice_are_told_with_what_is_allowed() -> None:
    for given, says in (
        (
            ("bench", "throughput", "--repeats", "0"),
            "--repeats is 0: input should be greater than or equal to 1",
        ),
        (
            ("bench", "scale-step", "--max-replicas", "1"),
            "--max-replicas is 1: .* greater than or equal to 2",
        ),
        (
            ("plan", "--gpu-memory-utilization", "2"),
            "--gpu-memory-utilization is 2: .* less than or equal to 1",
        ),
        (("simulate", "trace.jsonl", "--move", "maybe"), "--move is 'maybe': .* 'yes', 'no', 'both'"),
        (("simulate", "trace.jsonl", "--rate", "inf"), "--rate is inf: input should be a finite number"),
        (("simulate", "trace.jsonl", "--start-s", "5"), "--start-s 5.0 has no effect without --autoscale"),
        (
            ("simulate", "trace.jsonl", "--autoscale", "work", "--min-replicas", "5", "--max-replicas", "4"),
            "--max-replicas is 4, it must be at least --min-replicas 5",
        ),
        (("trace", "day", "a", "b", "--low", "3", "--high", "1"), "--high is 1, it must be at least --low 3"),
    ):
        result = CliRunner().invoke(app, list(given))
        assert isinstance(result.exception, InvalidRequest), result.output
        with pytest.raises(InvalidRequest, match=says):
            raise result.exception
