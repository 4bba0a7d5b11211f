"""A command of ours as the child of a benchmark or a test: it hears its own signals alone, and ends with its parent."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
"""Where ``python -m`` finds our modules."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_child(
    *arguments: str, environment: Mapping[str, str] | None = None, **pipes: int | IO[Any]
) -> subprocess.Popen[str]:
    """Start ``python -m ARGUMENTS`` in a session of its own, as in a terminal of its own.

    It is sent SIGTERM when the thread that called this has ended, however that ended (on Linux).

    Args:
        environment: None: this process's.
        pipes: stdin, stdout and stderr, as ``subprocess.Popen`` takes them.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        **pipes,  # type: ignore[call-overload]
    )


def _end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
