"""A module of ours as a process of its own, which finds the modules that this process has found."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO


def start_module(module: str, stdin: int, stderr: int | IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Run ``python -m module`` with ``stdin``.

    ``-m`` alone would look into the working folder first: a user's own ``workers`` there would take ours' place.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=stdin,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
    )
