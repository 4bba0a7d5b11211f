"""The file that a command writes its results to: tried before the work, so that a wrong name costs none of it.

Its folder must be there: one that is made where a name was mistyped would stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.markup import escape

from deploy.console import console
from workers.engine.errors import InvalidRequest


def check_output(path: Path, flag: str) -> None:
    """Return if ``path`` can be written; what is in it stays, and what is not there is not made.

    Raises:
        InvalidRequest: it cannot be written; the message names ``flag``.
    """
    is_new = not path.exists()
    if path.is_fifo() or path.is_char_device() or path.is_block_device():
        return  # it would notice
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.resolve().unlink()  # a link to it stays
    except OSError as error:
        raise _not_written(path, flag, error) from None


@contextmanager
def open_output(path: Path, flag: str) -> Iterator[TextIO]:
    """Open ``path`` to write text line by line, whatever was in it before.

    Raises:
        InvalidRequest: it cannot be written, or no more of it, as on a full disk; the message names ``flag``.
    """
    try:
        with path.open("w", encoding="utf-8", buffering=1) as file:
            yield file
    except OSError as error:
        raise _not_written(path, flag, error) from None


@contextmanager
def replace_at_end(path: Path, flag: str) -> Iterator[TextIO]:
    """Write text line by line to ``partial_of(path)``, which takes the place of ``path`` where all went well.

    Until then what is in ``path`` stays; where a run was broken off, the file beside it that has its results is named.
    Mode and, where allowed, owner stay too. What cannot be replaced (it is a mount point, say) is written over at the
    end. A pipe, a device, and a file beside which none can be made are written as they are.

    Raises:
        InvalidRequest: it cannot be written, or no more of it; the message names ``flag`` and what was written.
    """
    check_output(path, flag)
    partial = partial_of(path)
    file = _open_beside(path, partial)
    if file is None:
        with open_output(path, flag) as file:
            yield file
        return
    try:
        with file:
            yield file
        _take_place(partial, path.resolve())
    except OSError as error:
        raise _not_written(path, flag, error, partial) from None
    except BaseException:
        console.print(f"Broken off; what there is: {escape(str(partial))}", soft_wrap=True)
        raise


def partial_of(path: Path) -> Path:
    """Where results are until they are complete."""
    return path.resolve().with_name(f"{path.resolve().name}.partial")


def is_same_file(path: Path, other: Path) -> bool:
    """Whether to write to ``path`` would change the file ``other``, which exists."""
    return os.path.isfile(path) and path.samefile(other)


def _open_beside(path: Path, partial: Path) -> TextIO | None:
    """An empty ``partial`` with mode and owner of ``path``; None: ``path`` is no file, or has no place beside it."""
    target = path.resolve()  # a link stays one
    if path.exists() and not target.is_file():
        return None  # also what /proc calls "pipe:[7]" and, once deleted, "out (deleted)"
    before = target.stat() if path.exists() else None
    mode = 0o666 if before is None else 0o600  # nobody may open it before it has the right mode
    try:
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    except OSError:
        return None
    if before is not None:
        with suppress(OSError):
            os.fchown(number, before.st_uid, before.st_gid)
        os.fchmod(number, before.st_mode & 0o777)
    return os.fdopen(number, "w", encoding="utf-8", buffering=1)


def _take_place(partial: Path, target: Path) -> None:
    try:
        partial.replace(target)
    except OSError:
        shutil.copyfile(partial, target)
        partial.unlink()


def _not_written(path: Path, flag: str, error: OSError, partial: Path | None = None) -> InvalidRequest:
    left = "" if partial is None else f"; what there is: {partial}"
    return InvalidRequest(f"{flag} {path} cannot be written: {error.strerror}{left}", flag.strip("-"))
