"""Metrics of all of Shoal's processes on one node, on one port.

A scrape through the endpoint's load balancer reads whichever process it hits. So each process (ingress, replica)
answers on a socket in a folder of the node, and whichever of them holds the port answers for all, its own socket
included; when that one ends, another takes the port. Each process's series carry its name in the label ``process``.
"""

from __future__ import annotations

import logging
import socketserver
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from urllib.request import urlopen

from prometheus_client import start_http_server
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

log = logging.getLogger(__name__)

PROCESS_LABEL = "process"
_RETRY_S = 2.0
_TIMEOUT_S = 5.0
_NUM_REFUSED = 2
"""Times that a port is refused until it is looked at who has it: at first, another of ours may be about to leave."""


def metrics_folder(port: int) -> Path:
    """Where the processes meet that answer on ``port`` of this node."""
    return Path(tempfile.gettempdir()) / f"shoal-metrics-{port}"


class NodeExporter:
    """One process's part. ``render`` gives its page; it is called on other threads."""

    def __init__(
        self,
        name: str,
        render: Callable[[], bytes],
        folder: Path,
        host: str,
        port: int,
        retry_s: float = _RETRY_S,
    ) -> None:
        """
        Args:
            name: of the process, unique on the node.
            folder: for the sockets; the same in all processes of the node, and this user's alone.
            retry_s: how often it tries for a port that another holds.

        Raises:
            OSError: the folder is somebody else's, or cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise OSError(f"{folder} is open to other users; remove it")
        self._name = name
        self._path = folder / f"{name}.sock"
        self._path.unlink(missing_ok=True)
        self._server = _page_server(self._path, render)
        self._folder, self._host, self._port, self._retry_s = folder, host, port, retry_s
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True, name="metrics-page"),
            threading.Thread(target=self._hold_port, daemon=True, name="metrics-port"),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let go of socket and port; another process takes the port."""
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _hold_port(self) -> None:
        registry = CollectorRegistry()
        registry.register(_Merged(self._folder))
        num_refused = 0
        while not self._stopped.is_set():
            try:
                server, thread = start_http_server(self._port, self._host, registry)
            except OSError as error:  # another process holds it: of this node's, or one that is not ours
                num_refused += 1
                if num_refused == _NUM_REFUSED and not self._is_told():
                    log.error(
                        "port %d of %s tells no metrics of this process: %s", self._port, self._host, error
                    )
                self._stopped.wait(self._retry_s)
                continue
            self._stopped.wait()
            server.shutdown()
            server.server_close()
            thread.join(_TIMEOUT_S)

    def _is_told(self) -> bool:
        """Whether whoever holds the port tells this process's metrics."""
        try:
            with urlopen(f"http://{self._host}:{self._port}/metrics", timeout=_TIMEOUT_S) as page:
                return f'{PROCESS_LABEL}="{self._name}"' in page.read().decode(errors="replace")
        except (OSError, HTTPException):
            return False


def _page_server(path: Path, render: Callable[[], bytes]) -> socketserver.ThreadingUnixStreamServer:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(render())

    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    return server


class _Merged(Collector):
    """The pages of all sockets in a folder as one, family by family."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        """Nothing is known before it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read all pages; a process that has just ended is left out."""
        families: dict[str, Metric] = {}
        for path in sorted(self._folder.glob("*.sock")):
            page = _read_page(path)
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, PROCESS_LABEL: path.stem}))
        yield from families.values()


def _read_page(path: Path) -> str:
    pieces: list[bytes] = []
    with socket(AF_UNIX, SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(path))
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        except ConnectionRefusedError:  # its process was killed
            path.unlink(missing_ok=True)
            return ""
        except OSError as error:
            log.warning("no metrics from %s: %s", path.stem, error)
            return ""
    return b"".join(pieces).decode()
