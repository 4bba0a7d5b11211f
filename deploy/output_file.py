"""The file that a command writes its results to: tried before the work, so that a wrong name costs none of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from workers.engine.errors import InvalidRequest


def check_output(path: Path, flag: str) -> None:
    """Return if ``path`` can be written; what is in it stays, and what is not there is not made.

    Raises:
        InvalidRequest: it cannot be written; the message names ``flag``.
    """
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.is_dir()):
        return  # a pipe or a device, which would notice
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _not_written(path, flag, error) from None


@contextmanager
def open_output(path: Path, flag: str) -> Iterator[TextIO]:
    """Open ``path`` to write text, whatever was in it before.

    Raises:
        InvalidRequest: it cannot be written, or no more of it, as on a full disk; the message names ``flag``.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise _not_written(path, flag, error) from None


@contextmanager
def replace_at_end(path: Path, flag: str) -> Iterator[TextIO]:
    """Write text line by line to ``partial_of(path)``, which takes the place of ``path`` where all went well.

    Until then what is in ``path`` stays; what a run that was broken off has written can be read beside it. A pipe or
    a device is written as it is.

    Raises:
        InvalidRequest: it cannot be written, or no more of it; the message names ``flag``.
    """
    check_output(path, flag)
    target = path.resolve()  # a link stays one
    if target.exists() and not target.is_file():
        with open_output(path, flag) as file:
            yield file
        return
    partial = partial_of(target)
    try:
        with partial.open("w", encoding="utf-8", buffering=1) as file:
            yield file
        partial.replace(target)
    except OSError as error:
        raise _not_written(path, flag, error) from None


def partial_of(path: Path) -> Path:
    """Where results are until they are complete."""
    return path.resolve().with_name(f"{path.resolve().name}.partial")


def _not_written(path: Path, flag: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{flag} {path} cannot be written: {error.strerror}", flag.strip("-"))
