"""Ports that a cluster cannot have are told before anything starts, with the flag that names them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from deploy.ports import check_ports, choose_ports, claim_inner_ports, claim_ports
from deploy.runtime import find_free_ports
from deploy.settings import make_settings
from workers.engine.errors import InvalidRequest


def listen(family: socket.AddressFamily, host: str) -> socket.socket:
    """A port on which somebody listens, as HAProxy does: another of this user's processes could bind beside it."""
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, 0))
    listening.listen()
    return listening


@pytest.mark.parametrize("field", ["port", "grpc_port", "metrics_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "listener",
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")],
    ids=["loopback", "all", "all-of-ipv6"],
)
def test_a_port_in_use_is_told_with_its_flag(
    listener: tuple[socket.AddressFamily, str], field: str, host: str
) -> None:
    (free,) = find_free_ports("127.0.0.1", 1, 24000)
    with listen(*listener) as listening:
        taken = listening.getsockname()[1]
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


@pytest.mark.skipif(sys.platform != "linux", reason="others' sockets can be seen on Linux")
def test_who_has_a_port_is_told() -> None:
    with listen(socket.AF_INET, "127.0.0.1") as listening:
        taken = listening.getsockname()[1]

        with pytest.raises(InvalidRequest, match=rf"in use by \S+ \(process {os.getpid()}\): stop"):
            check_ports(make_settings(port=taken))


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
@pytest.mark.parametrize("field", ["port", "metrics_port"])
def test_two_clusters_that_start_at_once_cannot_both_have_a_port(field: str) -> None:
    port, own, other = find_free_ports("127.0.0.1", 3, 24000)
    claims = claim_ports(make_settings(**{"port": own, field: port}))
    settings = {"port": other, field: port}
    starts = (
        "from deploy.ports import claim_ports\nfrom deploy.settings import make_settings\n"
        f"claim_ports(make_settings(**{settings!r}))"
    )

    def complaint() -> str:
        done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=False)
        return done.stderr

    told = complaint()
    assert f"machine (process {os.getpid()}) has port {port} or is about to: choose another" in told
    assert f"with --{field.replace('_', '-')}" in told
    for claim in claims:
        claim.close()
    assert complaint() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_a_claim_that_fails_leaves_none_behind() -> None:
    first, second = find_free_ports("127.0.0.1", 2, 24000)
    (held,) = claim_ports(make_settings(port=second))

    with pytest.raises(InvalidRequest, match=f"has port {second}"):
        claim_ports(make_settings(port=first, metrics_port=second))

    held.close()
    for claim in claim_ports(make_settings(port=first, metrics_port=second)):
        claim.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_ports_that_commands_choose_at_once_are_all_different_and_nobody_elses() -> None:
    start = find_free_ports("127.0.0.1", 2, 24000)[0]
    (endpoint,) = claim_ports(make_settings(port=start))
    chosen = [choose_ports(2, start) for _ in range(3)]
    try:
        ports = [port for one in chosen for port in one.ports]
        assert len(set(ports)) == 6
        assert start not in ports
    finally:
        endpoint.close()
        for one in chosen:
            one.release()

    again = choose_ports(1, start)
    again.release()
    assert again.ports == [start]


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
