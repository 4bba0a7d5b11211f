"""How processes of the cluster write logs: for people, or an object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from typing import Any

PACKAGES = ("router", "cluster", "workers", "shoal")
_SERVE = "ray.serve"


def log_object(
    level: str, process: str, logger: str, message: str, created_s: float | None = None, **fields: Any
) -> str:
    """One line of a JSON log, without its end."""
    time_s = time.time() if created_s is None else created_s
    line = {
        "time": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "process": process,
        "logger": logger,
        "message": message,
    }
    return json.dumps(line | fields, default=str)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what stands in ``extra={"fields": {...}}`` becomes its keys."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return log_object(
            record.levelname, self._process, record.name, record.getMessage(), record.created, **fields
        )


class TextFormatter(logging.Formatter):
    """Time, level, process and message; fields as ``key=value``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        fields = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items())])


def set_up_logs(form: str, process: str) -> None:
    """Write this process's logs as ``text`` or ``json``, ours and Ray Serve's alike. Once a process.

    Where Serve writes its own: it sends a replica's standard error through its logger, which would put its own words
    before each of our lines.
    """
    formatter = JsonFormatter(process) if form == "json" else TextFormatter(process)
    handlers = [_target(one) for one in logging.getLogger(_SERVE).handlers] or [
        logging.StreamHandler(sys.stderr)
    ]
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.getLogger(_SERVE).setLevel(logging.INFO)  # from here on its lines have our form
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _target(handler: logging.Handler) -> logging.Handler:
    """What writes in the end: Serve puts a buffer before its file."""
    if isinstance(handler, MemoryHandler) and handler.target is not None:
        return handler.target
    return handler
