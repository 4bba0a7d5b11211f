"""A cluster in a process of its own, started as a user starts it and seen only from outside.

For benchmarks and tests: it can be killed, and its processes can be found by kind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import psutil

from deploy.child_process import start_child
from deploy.ports import choose_ports
from deploy.processes import busiest, processes_of
from deploy.runtime import Runtime
from workers.checkpoint.source import DEMO_MODEL
from workers.engine.errors import ShoalError

_UP = "Shoal answers at"


class ServedCluster:
    """``shoal serve`` as a user starts it: a process of its own, seen only from outside.

    It ends with the thread that makes it, at the latest (on Linux).
    """

    def __init__(self, *flags: str) -> None:
        self._chosen = choose_ports(1, 18000 + os.getpid() % 1000)
        (self.port,) = self._chosen.ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = DEMO_MODEL
        self.process = start_child(
            *("shoal", "serve", "--port", str(self.port), *flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
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
        """Return once it says that it answers.

        Raises:
            ShoalError: it does not in time, or it ends instead; the message has what it said.
        """
        if not self._is_up.wait(timeout_s):
            raise ShoalError(f"the cluster is not up after {timeout_s:g} s:\n{''.join(self.log)}")
        if not any(_UP in line for line in self.log):
            raise ShoalError(f"the cluster ended instead of coming up:\n{''.join(self.log)}")

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
        self._chosen.release()
        return code
