"""The file that a command writes its results to: opened before the work, so that a wrong name costs none of it."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from workers.engine.errors import InvalidRequest


def open_output(path: Path, flag: str) -> TextIO:
    """Open ``path`` to write text, whatever was in it before.

    Raises:
        InvalidRequest: it cannot be written; the message names ``flag``.
    """
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{flag} {path} cannot be written: {error.strerror}", flag.strip("-")) from None
