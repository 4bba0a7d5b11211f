"""Programs of one rank each, run together as a group; one that does not end says where it stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workers.model.rank_config import LOOPBACK_ENVIRONMENT


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
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments, str(rank), str(tp_size), f"file://{folder}/meet"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ
                | LOOPBACK_ENVIRONMENT
                | {"PYTHONFAULTHANDLER": "1"}  # SIGABRT shows the stacks of a process that hangs
                | ({"CUDA_VISIBLE_DEVICES": str(rank)} if is_isolated else {}),
            )
            for rank in range(tp_size)
        ]
        deadline_s = time.monotonic() + limit_s
        is_late = False
        answers = []
        try:
            for rank in ranks:
                try:
                    answers.append(rank.communicate(timeout=max(deadline_s - time.monotonic(), 0.1)))
                except subprocess.TimeoutExpired:
                    is_late = True
                    rank.send_signal(signal.SIGABRT)
                    answers.append(rank.communicate(timeout=10))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    told = "\n".join(
        f"-- rank {rank} of {tp_size} (exit {process.returncode}):\n{complaints}"
        for rank, (process, (_, complaints)) in enumerate(zip(ranks, answers, strict=True))
    )
    assert not is_late, f"no end after {limit_s:g} s\n{told}"
    assert all(rank.returncode == 0 for rank in ranks), told
    return [json.loads(printed) for printed, _ in answers]
