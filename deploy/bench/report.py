"""Results as files: what was measured, with which settings, on what machine, at which commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.console import console
from deploy.output_file import open_output
from deploy.tables import print_table


def environment() -> dict[str, Any]:
    """Where and when a figure was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write ``result`` as indented JSON; None: nowhere.

    Raises:
        InvalidRequest: it cannot be written.
    """
    if path is not None:
        with open_output(path, "--json") as file:
            file.write(json.dumps(result, indent=2) + "\n")


def show_runs(title: str, rows: list[dict[str, Any]]) -> None:
    """A table with one column a run and one line a figure."""
    headings = ["", *(f"run {number}" for number in range(1, len(rows) + 1))]
    names = dict.fromkeys(name for row in rows for name in row)
    print_table(
        console, headings, [[name, *(str(row.get(name, "")) for row in rows)] for name in names], title
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
