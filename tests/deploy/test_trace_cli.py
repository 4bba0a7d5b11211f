"""``shoal trace``: what cannot be written is told before a trace is read, and no recording is written over."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.commands import app
from router.trace import read_trace
from workers.engine.errors import InvalidRequest

LINE = '{{"timestamp": {0}, "input_length": 40, "output_length": 7, "hash_ids": [{0}]}}\n'


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(LINE.format(1000 * second) for second in range(3)))
    return path


@pytest.mark.parametrize("command", ["merge", "day"])
def test_what_cannot_be_written_is_refused_and_nothing_is_made(recorded: Path, command: str) -> None:
    folder = recorded.parent
    for output, says in (
        (folder / "none" / "day.jsonl", "OUTPUT .* cannot be written: No such file"),
        (folder, "OUTPUT .* cannot be written: Is a directory"),
        (recorded, "OUTPUT .* would overwrite what was recorded: name another"),
    ):
        result = CliRunner().invoke(app, ["trace", command, str(recorded), str(output)])
        with pytest.raises(InvalidRequest, match=says):
            raise result.exception or AssertionError(result.output)
    assert list(folder.iterdir()) == [recorded]


def test_a_day_is_written_that_can_be_read(recorded: Path) -> None:
    output = recorded.with_name("day.jsonl.gz")

    result = CliRunner().invoke(app, ["trace", "day", str(recorded), str(output), "--hours", "0.1"])

    assert result.exit_code == 0, result.output
    assert len(read_trace(output).requests) > 100
