"""Ports that a cluster cannot have are told before anything starts, with the flag that names them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.ports import check_ports, claim_inner_ports, claim_port
from deploy.runtime import find_free_ports
from deploy.settings import make_settings
from workers.engine.errors import InvalidRequest


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens, as HAProxy does: another of this user's processes could bind beside it."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("field", ["port", "grpc_port", "metrics_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_told_with_its_flag(taken: int, field: str, host: str) -> None:
    (free,) = find_free_ports("127.0.0.1", 1, 24000)
    settings = make_settings(host=host, **{"port": free, field: taken})

    with pytest.raises(
        InvalidRequest, match=f"port {taken} on {host} is in use.* --{field.replace('_', '-')}"
    ):
        check_ports(settings)


def test_one_port_for_two_purposes_is_refused() -> None:
    (free,) = find_free_ports("127.0.0.1", 1, 24000)

    with pytest.raises(InvalidRequest, match=f"--port and --metrics-port are both {free}"):
        check_ports(make_settings(port=free, metrics_port=free))


def test_a_host_that_is_not_here_is_told() -> None:
    with pytest.raises(InvalidRequest, match=r"--host 203\.0\.113\.7 is no address of this machine"):
        check_ports(make_settings(host="203.0.113.7"))


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_two_clusters_that_start_at_once_cannot_both_have_a_port() -> None:
    (port,) = find_free_ports("127.0.0.1", 1, 24000)
    claim = claim_port(port)
    assert claim is not None
    other = f"from deploy.ports import claim_port; claim_port({port})"

    def is_refused() -> bool:
        done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
        return "another shoal serve on this machine has port" in done.stderr

    assert is_refused()
    claim.close()
    assert not is_refused()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_clusters_that_start_at_once_have_no_inner_port_in_common() -> None:
    clusters = [claim_inner_ports(67, port=8000) for _ in range(3)]
    try:
        ports = [port for one in clusters for port in one.ports]
        assert len(set(ports)) == 3 * 67
    finally:
        for one in clusters:
            one.release()


def test_an_inner_port_in_use_is_left_out() -> None:
    before = claim_inner_ports(3, port=8000)
    before.release()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", before.ports[0]))
        after = claim_inner_ports(67, port=8000)
        after.release()

    assert before.ports[0] not in after.ports
    assert len(after.ports) == 67
