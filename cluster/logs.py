"""How processes of the cluster write logs: for people, or an object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

PACKAGES = ("router", "cluster", "workers", "shoal")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what stands in ``extra={"fields": {...}}`` becomes its keys."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, process and message; fields as ``key=value``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        fields = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items())])


def set_up_logs(form: str, process: str) -> None:
    """Send this process's logs to standard error, which Ray keeps, as ``text`` or ``json``. Once a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if form == "json":
        for one in logging.getLogger("ray.serve").handlers:
            one.setFormatter(JsonFormatter(process))
