"""The console of ``shoal serve --log-format json``: one JSON object a line, whoever in this process writes it.

Lines that are no objects yet (our own progress, warnings of libraries, tracebacks) are wrapped; the logs of ingresses
and replicas, which Ray keeps in files, come as they are. What collects a container's logs reads all of it here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cluster.logs import log_object
from deploy.console import console

_PROCESS = "serve"
_PERIOD_S = 0.5
_ERROR = "error: "
_SERVE = "ray.serve"
_THEIRS = {"levelname", "message"}
"""Keys of Ray Serve's own objects."""
_WIDTH = 1 << 16
"""No line is broken: a message is one object."""


class JsonConsole:
    """Takes over standard error of this process, until it exits."""

    def __init__(self) -> None:
        self._out = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        console.width = _WIDTH
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._wrap, os.fdopen(reading, errors="replace"))
        atexit.register(self.close)

    def follow(self, logs: Path) -> None:
        """Write what ingresses and replicas add to their logs in this folder, which need not be there yet."""
        self._start(self._follow, logs)

    def close(self) -> None:
        """Write what is under way and give standard error back. Safe to call twice."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            os.dup2(self._out, 2)  # the last end of the pipe that is written to
            for thread in self._threads:
                thread.join(2 * _PERIOD_S)

    def _start(self, work: Callable[..., None], argument: object) -> None:
        self._threads.append(threading.Thread(target=work, args=(argument,), daemon=True))
        self._threads[-1].start()

    def _wrap(self, lines: IO[str]) -> None:
        for line in lines:
            self._write(as_object(line.rstrip()))

    def _follow(self, logs: Path) -> None:
        files: dict[Path, LogFile] = {}
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(_PERIOD_S)
            for path in sorted(logs.glob("replica_*.log")):
                for line in files.setdefault(path, LogFile(path)).new_lines():
                    self._write(as_object(line))

    def _write(self, line: str) -> None:
        if not line:
            return
        with contextlib.suppress(OSError):  # nobody reads it any more; who writes must not wait for that
            os.write(self._out, line.encode() + b"\n")  # one call a line: lines of two threads do not mix


class LogFile:
    """What has been added to a file since the last look. One that was rotated begins anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Whole lines only; none if the file is gone."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def as_object(line: str) -> str:
    """``line`` as an object of ours: itself if it is one, Ray Serve's own in our keys; nothing for nothing."""
    if not line.strip():
        return ""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return _with_our_keys(found) if found.keys() >= _THEIRS else line
    level = "ERROR" if line.startswith(_ERROR) else "INFO"
    return log_object(level, _PROCESS, "console", line.removeprefix(_ERROR).strip())


def _with_our_keys(found: dict[str, Any]) -> str:
    """A line that Serve wrote before our own code ran in its process."""
    process = f"{found.get('deployment', 'serve')}-{found.get('process', '')}".rstrip("-")
    fields = {"exception": found["exc_text"]} if found.get("exc_text") else {}
    return log_object(
        str(found["levelname"]), process, _SERVE, str(found["message"]), _seconds(found), **fields
    )


def _seconds(found: dict[str, Any]) -> float | None:
    nanoseconds = found.get("timestamp_ns")
    return nanoseconds / 1e9 if isinstance(nanoseconds, int) else None
