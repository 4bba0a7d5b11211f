"""The processes of one local cluster, found again by a mark in their environment.

A driver that is killed with -9 leaves Ray, HAProxy and workers behind. Every process that Shoal starts
inherits ``SHOAL_RUNTIME_DIR``; whoever carries the same folder belongs to the same cluster and can be ended
by it: the reaper (`deploy/reaper.py`) when the driver is gone, or the next start on the same port.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_BASE = Path("/tmp")
RUNTIME_DIR_VARIABLE = "SHOAL_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The folder of one local cluster: sockets, HAProxy's files, Ray's session."""

    folder: Path

    @staticmethod
    def of_port(port: int) -> Runtime:
        """This process's cluster on ``port``.

        Short: HAProxy takes socket paths of 97 bytes, of which Ray's node id and the socket's name take 70.
        """
        return Runtime.of_process(port, os.getpid())

    @staticmethod
    def of_process(port: int, pid: int) -> Runtime:
        """The cluster on ``port`` whose driver is process ``pid``."""
        return Runtime(_BASE / f"shoal-{port}-{pid}")

    @staticmethod
    def of_driver(pid: int) -> list[Runtime]:
        """The clusters whose driver is process ``pid``, however far they have come."""
        return [Runtime(folder) for folder in _BASE.glob(f"shoal-[0-9]*-{pid}")]

    @property
    def stopping(self) -> Path:
        """A file that is there once the cluster is being stopped: what ends from then on is no failure."""
        return self.folder / "stopping"

    @property
    def serve_logs(self) -> Path:
        """Where Ray Serve and Shoal's ingresses and replicas write their logs."""
        return self.folder / "ray/session_latest/logs/serve"

    @staticmethod
    def leftovers() -> list[Runtime]:
        """This user's clusters whose driver has ended without cleaning up."""
        return [
            Runtime(folder)
            for folder in _BASE.glob("shoal-[0-9]*-[0-9]*")
            if folder.stat().st_uid == os.getuid()
            and not psutil.pid_exists(int(folder.name.rsplit("-", 1)[1]))
        ]

    def create(self) -> None:
        """Make the folder, private to this user."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self) -> None:
        """Delete the folder and all in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster but the calling one and its ancestors.

        Some write their title over their environment: their parents tell, or the files that they have open.
        """
        own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter(["pid"]):
            if process.pid in own:
                continue
            try:
                if self._owns(process):
                    found[process.pid] = process
                    found |= {child.pid: child for child in process.children(recursive=True)}
            except (psutil.Error, OSError):
                continue  # gone meanwhile, or not ours to look at
        return [process for pid, process in found.items() if pid not in own]

    def _owns(self, process: psutil.Process) -> bool:
        environment = process.environ()
        if environment:
            return environment.get(RUNTIME_DIR_VARIABLE) == str(self.folder)
        return any(Path(file.path).is_relative_to(self.folder) for file in process.open_files())

    def sweep(self, grace_s: float = 0.0) -> int:
        """End what is left of this cluster: SIGTERM where there is a grace, then SIGKILL.

        Returns:
            How many processes were left.
        """
        left = self.processes()
        num_left = len(left)
        if grace_s > 0 and left:
            _signal(left, kill=False)
            psutil.wait_procs(left, timeout=grace_s)
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            _signal(left, kill=True)
            psutil.wait_procs(left, timeout=1.0)
        return num_left


def _signal(processes: list[psutil.Process], *, kill: bool) -> None:
    for process in processes:
        try:
            if kill:
                process.kill()
            else:
                process.terminate()
        except psutil.Error:
            continue  # it ended by itself


def port_is_free(host: str, port: int) -> bool:
    """True if ``port`` can be bound on ``host`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def find_free_ports(host: str, count: int, start: int) -> list[int]:
    """The first ``count`` free ports from ``start`` upwards.

    Raises:
        RuntimeError: fewer are free.
    """
    found: list[int] = []
    for port in range(start, 65536):
        if port_is_free(host, port):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"fewer than {count} free ports from {start} on {host}")
