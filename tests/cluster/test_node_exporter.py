"""One port a node answers for all of its processes, and outlives whichever holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.node_exporter import NodeExporter
from deploy.runtime import find_free_ports


@pytest.fixture
def port() -> int:
    return find_free_ports("127.0.0.1", 1, 25000)[0]


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[object]:
    started: list[NodeExporter] = []

    def one(name: str, value: int) -> NodeExporter:
        page = (
            "# HELP requests_total Requests\n# TYPE requests_total counter\n"
            f'requests_total{{model="a"}} {value}\n# TYPE up_s gauge\nup_s {value}\n'
        )
        started.append(NodeExporter(name, page.encode, tmp_path / "metrics", "127.0.0.1", port, retry_s=0.05))
        return started[-1]

    yield one
    for exporter in started:
        exporter.stop()


def scrape(port: int, wanted: set[str]) -> dict[str, float]:
    """Values of ``requests_total`` by process, once all wanted are there."""
    deadline = time.monotonic() + 10
    found: dict[str, float] = {}
    while set(found) != wanted:
        assert time.monotonic() < deadline, f"{sorted(found)} instead of {sorted(wanted)}"
        try:
            text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except URLError:
            continue
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert text.count("# TYPE requests_total") <= 1
        found = {s.labels["process"]: s.value for s in families["requests"].samples} if families else {}
    return found


def test_one_port_tells_of_all_processes(start, port: int) -> None:
    start("ingress-1", 3)
    start("replica-1", 5)

    assert scrape(port, {"ingress-1", "replica-1"}) == {"ingress-1": 3, "replica-1": 5}


def test_another_process_takes_the_port_of_one_that_ends(start, port: int) -> None:
    first = start("ingress-1", 3)
    scrape(port, {"ingress-1"})
    start("replica-1", 5)

    first.stop()

    assert scrape(port, {"replica-1"}) == {"replica-1": 5}


def test_the_socket_of_a_killed_process_is_cleared_away(start, port: int, tmp_path: Path) -> None:
    start("ingress-1", 3)
    killed = start("replica-1", 5)
    killed._server.shutdown()
    killed._server.server_close()  # its socket file stays

    assert scrape(port, {"ingress-1"})
    assert not (tmp_path / "metrics" / "replica-1.sock").exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, port: int) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)

    with pytest.raises(OSError, match="open to other users"):
        NodeExporter("x", bytes, tmp_path / "open", "127.0.0.1", port)


def test_a_port_that_somebody_else_has_is_told_and_one_of_ours_is_not(
    start, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    def complaints() -> list[str]:
        return [one.getMessage() for one in caplog.records if "tells no metrics" in one.getMessage()]

    with HTTPServer(("127.0.0.1", port), SimpleHTTPRequestHandler) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        start("ingress-1", 3)
        deadline = time.monotonic() + 10
        while not complaints():
            assert time.monotonic() < deadline, "nothing was said"
            time.sleep(0.01)
        foreign.shutdown()
    scrape(port, {"ingress-1"})
    start("replica-1", 5)
    scrape(port, {"ingress-1", "replica-1"})

    assert len(complaints()) == 1
    assert f"port {port} of 127.0.0.1 tells no metrics of this process" in complaints()[0]
