"""A place to meet goes with the process that owned it, at the latest when the next is made, and never before."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.model.rendezvous import forget_rendezvous, is_of_one_host, new_rendezvous


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made_by_another(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that owns a rendezvous and lives until its input closes."""
    code = "from workers.model.rendezvous import new_rendezvous; print(new_rendezvous(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip().removeprefix("file://"))
    path.touch()  # as torch does when the first rank arrives
    return process, path


def test_what_a_killed_process_left_is_gone_with_the_next_and_what_a_living_one_has_stays(
    folder: Path,
) -> None:
    process, path = made_by_another(folder)

    new_rendezvous()
    assert path.exists()

    process.kill()
    process.communicate()
    new_rendezvous()
    assert not path.exists()


def test_names_that_tell_no_owner_here_are_left_alone(folder: Path) -> None:
    namespace, pid, started, end = _path(new_rendezvous()).name.removeprefix("shoal-rendezvous-").split("-")
    later = folder / f"shoal-rendezvous-{namespace}-{pid}-{int(started) - 3600}-{end}"
    others = [
        folder
        / f"shoal-rendezvous-{int(namespace) + 1}-{pid}-{int(started) - 3600}-{end}",  # another container's
        folder / "shoal-rendezvous-0123456789abcdef",
        folder / f"shoal-rendezvous-{namespace}-{pid}-{started}-{end}",
    ]
    for path in (later, *others):
        path.touch()

    new_rendezvous()

    assert sorted(folder.iterdir()) == sorted(others)


def test_it_is_forgotten_as_often_as_one_likes(folder: Path) -> None:
    rendezvous = new_rendezvous()
    assert is_of_one_host(rendezvous)
    _path(rendezvous).touch()

    for one in (rendezvous, rendezvous, "tcp://10.0.0.1:1", None):
        forget_rendezvous(one)

    assert list(folder.iterdir()) == []


def _path(rendezvous: str) -> Path:
    return Path(rendezvous.removeprefix("file://"))
