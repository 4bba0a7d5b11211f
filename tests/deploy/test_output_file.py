"""Where results are written: beside the file until they are complete, or in place where nothing can be beside it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.output_file import check_output, replace_at_end
from workers.engine.errors import InvalidRequest

FLAG = "--output-file"


def write(path: Path, then: Callable[[], None] = lambda: None) -> None:
    with replace_at_end(path, FLAG) as file:
        file.write("one\ntwo\n")
        then()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fail_with(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(path: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "replace", replace)


def test_a_pipe_is_written_as_it_is() -> None:
    source = "from pathlib import Path; from deploy.output_file import replace_at_end as at_end\n"
    source += "with at_end(Path('/dev/stdout'), '-o') as file: file.write('one')"

    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("one", "")


def test_a_named_pipe_is_written_as_it_is_line_by_line(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    has_line = threading.Event()

    def reader() -> None:
        with pipe.open() as file:
            for text in file:
                read.append(text)
                has_line.set()

    thread = threading.Thread(target=reader)
    thread.start()
    with replace_at_end(pipe, FLAG) as file:
        file.write("one\n")
        assert has_line.wait(10)
        file.write("two\n")
    thread.join(10)

    assert read == ["one\n", "two\n"]
    assert names(tmp_path) == {"pipe"}


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EPERM])
def test_a_file_that_cannot_be_replaced_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "out"
    path.write_text("of another day, and longer than what comes\n")
    inode = path.stat().st_ino
    fail_with(code, monkeypatch)

    write(path)

    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_ino == inode
    assert names(tmp_path) == {"out"}


def test_a_failure_at_the_end_names_the_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, partial = tmp_path / "out", tmp_path / "out.partial"
    path.write_text("of another day\n")
    fail_with(errno.EBUSY, monkeypatch)

    def becomes_a_folder() -> None:
        path.unlink()
        path.mkdir()

    with pytest.raises(InvalidRequest, match=rf"out cannot be written: .*; what there is: {partial}"):
        write(path, becomes_a_folder)

    assert partial.read_text() == "one\ntwo\n"


def test_a_run_that_is_broken_off_names_the_partial_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", interrupt)

    captured = capsys.readouterr()
    assert captured.err == f"Broken off; what there is: {tmp_path / 'out.partial'}\n"
    assert captured.out == ""


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_beside_which_none_can_be_made_is_written_in_place(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / ("x" * 250)  # with .partial the name is too long
    if exists:
        path.write_text("of another day, and longer than what comes\n")

    write(path)

    assert path.read_text() == "one\ntwo\n"
    assert names(tmp_path) == {path.name}


def test_a_file_keeps_its_mode_and_owner_and_results_are_as_private_on_the_way(tmp_path: Path) -> None:
    path, partial = tmp_path / "out", tmp_path / "out.partial"
    path.write_text("of another day\n")
    path.chmod(0o600)
    partial.write_text("of a run that was broken off\n")
    partial.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1234)
    before = path.stat()

    with replace_at_end(path, FLAG) as file:
        file.write("one\n")
        while_running = partial.stat().st_mode & 0o777

    after = path.stat()
    assert while_running == 0o600
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert path.read_text() == "one\n"


def test_a_link_stays_a_link_also_where_its_target_is_not_there_yet(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)

    check_output(link, FLAG)

    assert names(tmp_path) == {"link"}
    write(link)
    assert link.is_symlink()
    assert target.read_text() == "one\ntwo\n"
