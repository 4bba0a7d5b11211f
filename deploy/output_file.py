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


def _not_written(path: Path, flag: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{flag} {path} cannot be written: {error.strerror}", flag.strip("-"))
