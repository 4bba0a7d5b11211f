"""Programs of one rank each, run together as a group; one that does not end says where it stands.

As a program: the process of which ranks are forks, since torch takes longer to import than a small model to run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from workers.model.rank_config import LOOPBACK_ENVIRONMENT, RANK_ENVIRONMENT

_TELLING_S = 10.0
"""For stacks to be written."""


def run_ranks(
    program: Path, *arguments: str, tp_size: int, limit_s: float = 150.0, is_isolated: bool = False
) -> list[Any]:
    """Start ``program *arguments RANK SIZE RENDEZVOUS`` for each rank; return what each printed, read as JSON.

    Args:
        program: beside this file.
        limit_s: for all of them together; those that run on then fail the test with their threads' stacks.
        is_isolated: each sees its own CUDA device alone, as Ray's actors do.
    """
    with tempfile.TemporaryDirectory() as folder:
        stem = subprocess.Popen(
            [sys.executable, __file__, folder, str(tp_size), str(int(is_isolated)), str(program), *arguments],
            env=os.environ | RANK_ENVIRONMENT | LOOPBACK_ENVIRONMENT,
            start_new_session=True,  # all of them can be signalled at once
        )
        is_late = False
        try:
            stem.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            os.killpg(stem.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                stem.wait(_TELLING_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stem.pid, signal.SIGKILL)
            stem.wait()
        told = "\n".join(
            f"-- rank {rank} of {tp_size}:\n{_read(Path(folder, f'{rank}.err'))}" for rank in range(tp_size)
        )
        assert not is_late, f"no end after {limit_s:g} s\n{told}"
        assert stem.returncode == 0, told
        return [json.loads(_read(Path(folder, f"{rank}.out"))) for rank in range(tp_size)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(folder: str, tp_size: str, is_isolated: str, program: str, *arguments: str) -> int:
    """Fork the ranks; return 0 if all have ended well."""
    import workers.model.cuda_rank  # noqa: F401 - what takes long; it starts no thread and opens no device

    signal.signal(signal.SIGABRT, signal.SIG_IGN)  # the ranks' to answer
    pids = []
    for rank in range(int(tp_size)):
        pid = os.fork()
        if pid == 0:
            if is_isolated == "1":
                os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
            os._exit(_run(folder, rank, [program, *arguments, str(rank), tp_size, f"file://{folder}/meet"]))
        pids.append(pid)
    return int(any(os.waitpid(pid, 0)[1] for pid in pids))


def _run(folder: str, rank: int, command: list[str]) -> int:
    """Be a rank, with its output in files."""
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with open(Path(folder, f"{rank}.{name}"), "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream.fileno())
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    faulthandler.enable()  # SIGABRT shows the stacks of a process that hangs
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - told, and the exit code says so
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
