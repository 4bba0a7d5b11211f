"""The keys that are valid now: those of flags, and those of a file that is read again when it changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from router.tenancy.keys import FORMS, KeyRing, parse_keys
from workers.engine.errors import InvalidRequest

log = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
"""A look at the file costs microseconds; more often than once a second nobody would notice."""


def read_keys(path: Path) -> KeyRing:
    """The keys in a file.

    Raises:
        InvalidRequest: it cannot be read, or not be understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"the key file {path} cannot be read ({error.strerror}): name one that can", "api_keys"
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"the key file {path} is no text: {FORMS}", "api_keys") from None
    return parse_keys(text, str(path))


class KeySource:
    """Answers which ring of keys holds now. A file that has become unreadable leaves the last good keys valid."""

    def __init__(self, keys: KeyRing | None, path: Path | None, clock: Callable[[], float]) -> None:
        """``keys`` None and ``path`` None: no keys are asked for.

        Raises:
            InvalidRequest: the file is not to be understood at the start.
        """
        self._fixed = keys
        self._path = path
        self._clock = clock
        self._checked_s = clock()
        self._stamp = _stamp(path)
        self._ring = self._merged(read_keys(path)) if path is not None else keys

    def ring(self) -> KeyRing | None:
        """The keys that are valid; None if none are asked for."""
        if self._path is not None and self._clock() - self._checked_s >= CHECK_PERIOD_S:
            self._checked_s = self._clock()
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._reload(stamp)
        return self._ring

    def _reload(self, stamp: tuple[int, int, int] | None) -> None:
        assert self._path is not None, "only a file changes"
        try:
            self._ring = self._merged(read_keys(self._path))
        except InvalidRequest as error:
            log.error("keys stay as they were: %s", error)
        else:
            log.info("%s holds %d keys now", self._path, len(self._ring or ()))
        self._stamp = stamp

    def _merged(self, found: KeyRing) -> KeyRing:
        return KeyRing((*self._fixed.tenants, *found.tenants)) if self._fixed is not None else found


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Changes whenever the file does, a file put in its place included; None where there is none."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
