"""Ends what a cluster left when its driver is gone, however it went.

Runs as ``python -m deploy.reaper FOLDER`` in a session of its own, with the driver holding the other end of
its standard input: end of file means that the driver has ended, also by ``kill -9``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from deploy.runtime import RUNTIME_DIR_VARIABLE, Runtime


def start_reaper(runtime: Runtime) -> IO[bytes]:
    """Start the reaper of ``runtime``.

    Returns:
        The pipe that keeps it waiting. Keep it open for as long as the cluster is wanted.
    """
    # The reaper must not carry the mark itself, or it would end itself.
    environment = {name: value for name, value in os.environ.items() if name != RUNTIME_DIR_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.reaper", str(runtime.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert process.stdin is not None, "the reaper was started with a pipe"
    return process.stdin


def main() -> None:
    """Wait for the driver's end, then sweep."""
    sys.stdin.buffer.read()
    runtime = Runtime(Path(sys.argv[1]))
    if runtime.folder.exists():
        runtime.sweep(grace_s=2.0)
        runtime.remove()


if __name__ == "__main__":
    main()
