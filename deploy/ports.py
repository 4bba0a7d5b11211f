"""Ports of a cluster on this machine: each one free, each for one purpose, and the endpoint's claimed by one driver."""

from __future__ import annotations

import socket
import sys

from deploy.runtime import port_is_free
from deploy.settings import ServeSettings
from workers.engine.errors import InvalidRequest


def check_ports(settings: ServeSettings) -> None:
    """Return if every port that a flag names can be opened now.

    Raises:
        InvalidRequest: one is taken, or two flags name the same; the message names the flag.
    """
    if not port_is_free(settings.host, 0):
        raise InvalidRequest(
            f"--host {settings.host} is no address of this machine: use 127.0.0.1, or 0.0.0.0 for all of them",
            "host",
        )
    flags: dict[int, str] = {}
    for field in ("port", "grpc_port", "metrics_port"):
        port: int | None = getattr(settings, field)
        if port is None:
            continue
        flag = "--" + field.replace("_", "-")
        if port in flags:
            raise InvalidRequest(f"{flags[port]} and {flag} are both {port}: give each its own port", field)
        flags[port] = flag
        if not port_is_free(settings.host, port):
            raise InvalidRequest(
                f"port {port} on {settings.host} is in use: stop what listens there or choose another with {flag}",
                field,
            )


def claim_port(port: int) -> socket.socket | None:
    """Claim the endpoint's port among all drivers of this machine, whoever runs them.

    HAProxy binds so that another of its kind may bind beside it, and the kernel would deal connections out to both:
    of two clusters that start at once, both would find the port free and each answer some of the other's requests.

    Returns:
        What holds the claim: keep it open for as long as the cluster runs. None where there is no such means (macOS).

    Raises:
        InvalidRequest: another cluster has it.
    """
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0shoal-endpoint-{port}")  # no file: it goes with its process, however that ends
    except OSError:
        claim.close()
        raise InvalidRequest(
            f"another shoal serve on this machine has port {port} or is about to: choose another with --port",
            "port",
        ) from None
    return claim
