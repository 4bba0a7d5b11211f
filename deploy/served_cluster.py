"""A cluster in a process of its own, started as a user starts it and seen only from outside.

For benchmarks and tests: it can be killed, and its processes can be found by kind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from deploy.processes import busiest, processes_of
from deploy.runtime import Runtime, find_free_ports
from workers.checkpoint.source import DEMO_MODEL

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_UP = "Shoal answers at"
_ROOT = Path(__file__).resolve().parent.parent


class ServedCluster:
    """``shoal serve`` as a user starts it: a process of its own, seen only from outside.

    It ends with the thread that makes it, at the latest (on Linux).
    """

    def __init__(self, *flags: str) -> None:
        (self.port,) = find_free_ports("127.0.0.1", 1, 18000 + os.getpid() % 1000)
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = DEMO_MODEL
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "serve", "--port", str(self.port), *flags],
            cwd=_ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as in a terminal of its own
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self.log: list[str] = []
        self._is_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def runtime(self) -> Runtime:
        """The cluster's folder and mark."""
        return Runtime.of_process(self.port, self.process.pid)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if _UP in line:
                self._is_up.set()
        self._is_up.set()

    def wait_until_up(self, timeout_s: float = 170.0) -> None:
        """Return once it says that it answers; raise with its log if it ends instead."""
        assert self._is_up.wait(timeout_s), f"not up after {timeout_s} s:\n{''.join(self.log)}"
        assert any(_UP in line for line in self.log), f"it ended:\n{''.join(self.log)}"

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of this cluster with ``word`` in their command line or title."""
        return processes_of(self.runtime, word)

    def busiest(self, word: str) -> psutil.Process:
        """Of those processes, the one that is at work for a stream.

        Raises:
            ShoalError: there is none, or all are idle.
        """
        return busiest(self.runtime, word)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Stop it; return its exit code.

        SIGINT goes to every process of its group, as Ctrl-C in a terminal does, other signals to it alone.
        """
        if number == signal.SIGINT and self.process.poll() is None:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


def _end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it has ended, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
