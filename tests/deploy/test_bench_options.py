"""What the measuring commands share: a result that could not be written costs no measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from deploy.bench.cli import app as bench
from deploy.bench.report import write_result
from deploy.commands import app
from workers.engine.errors import InvalidRequest

NAMES = sorted(typer.main.get_group(bench).commands)


@pytest.mark.parametrize("command", [["simulate"], *(["bench", name] for name in NAMES)])
def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").write_text("")

    for path, says in (
        (tmp_path, "--json .* cannot be written: Is a directory"),
        (tmp_path / "file" / "a" / "b", "--json .* cannot be written: Not a directory"),
    ):
        result = CliRunner().invoke(app, [*command, "--json", str(path)])
        assert isinstance(result.exception, InvalidRequest), result.output
        with pytest.raises(InvalidRequest, match=says):
            raise result.exception


def test_a_result_is_written_in_a_new_folder_and_to_a_device(tmp_path: Path) -> None:
    write_result(tmp_path / "new" / "folder" / "result.json", {"bench": "b"})
    write_result(Path("/dev/null"), {"bench": "b"})

    assert (tmp_path / "new" / "folder" / "result.json").read_text() == '{\n  "bench": "b"\n}\n'
    with pytest.raises(InvalidRequest, match="--json /dev/full cannot be written: No space left"):
        write_result(Path("/dev/full"), {"bench": "b"})
