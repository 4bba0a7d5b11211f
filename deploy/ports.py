"""Ports of a cluster on this machine: each one free, each for one purpose, each claimed by one driver."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.port_owner import claim_owner, port_owner
from deploy.runtime import port_is_free
from deploy.settings import ServeSettings
from workers.engine.errors import InvalidRequest, ShoalError

_FIELDS = ("port", "grpc_port", "metrics_port")
_BLOCKS = [range(start, start + 80) for start in range(30000, 32720, 80)]
"""Below the ports that Linux gives to outgoing connections."""
_PREFIX, _ENDPOINT, _CHOICE = "shoal-", "endpoint-{}", "choice-{}"
"""Of names that are claimed."""
_SOCKETS = Path("/proc/net/unix")


@dataclass(frozen=True, slots=True)
class ChosenPorts:
    """Ports for a cluster whose user has named none. Nobody else chooses them until they are released."""

    ports: list[int]
    _claims: list[socket.socket]

    def release(self) -> None:
        """Let others choose them. Safe to call twice."""
        for claim in self._claims:
            claim.close()


@dataclass(frozen=True, slots=True)
class InnerPorts:
    """Ports behind the endpoint. Other clusters of this machine leave them alone until they are released."""

    ports: list[int]
    _claim: socket.socket | None

    def release(self) -> None:
        """Let others have them. Safe to call twice."""
        if self._claim is not None:
            self._claim.close()


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
    for field in _FIELDS:
        port: int | None = getattr(settings, field)
        if port is None:
            continue
        flag = _flag(field)
        if port in flags:
            raise InvalidRequest(f"{flags[port]} and {flag} are both {port}: give each its own port", field)
        flags[port] = flag
        if not port_is_free(settings.host, port):
            raise InvalidRequest(
                f"port {port} on {settings.host} is in use{port_owner(port)}: stop what listens there or choose "
                f"another with {flag}",
                field,
            )


def claim_ports(settings: ServeSettings) -> list[socket.socket]:
    """Claim every port that a flag names among all drivers of this machine, whoever runs them.

    HAProxy binds so that another of its kind may bind beside it, and the kernel would deal connections out to both:
    of two clusters that start at once, both would find the port free and each answer some of the other's requests.

    Returns:
        What holds the claims: keep it open for as long as the cluster runs. Empty where there is no such means (macOS).

    Raises:
        InvalidRequest: another cluster has one; nothing is claimed.
    """
    claims: list[socket.socket] = []
    for field, port in _named_ports(settings):
        try:
            claim = _claim(_ENDPOINT.format(port))
        except OSError:
            for held in claims:
                held.close()
            raise InvalidRequest(
                f"another cluster of Shoal on this machine{claim_owner(_PREFIX + _ENDPOINT.format(port))} has port "
                f"{port} or is about to: choose another with {_flag(field)}",
                field,
            ) from None
        if claim is not None:
            claims.append(claim)
    return claims


def choose_ports(count: int, start: int) -> ChosenPorts:
    """The first ``count`` ports of loopback from ``start`` upwards that nobody has, has claimed or has chosen.

    They are opened half a minute later, by this process or by a child, which claims them anew with ``claim_ports``.

    Raises:
        ShoalError: there are fewer; nothing is chosen.
    """
    chosen = ChosenPorts([], [])
    for port in range(start, 65536):
        try:
            claim = _claim(_CHOICE.format(port))
        except OSError:
            continue
        if port_is_free("127.0.0.1", port) and not _is_claimed(_ENDPOINT.format(port)):
            chosen.ports.append(port)
            if claim is not None:
                chosen._claims.append(claim)
        elif claim is not None:
            claim.close()
        if len(chosen.ports) == count:
            return chosen
    chosen.release()
    raise ShoalError(f"fewer than {count} ports from {start} upwards are free on 127.0.0.1")


def claim_inner_ports(count: int, port: int) -> InnerPorts:
    """Claim ports of loopback for the cluster whose endpoint is ``port``.

    Those that are free now are opened half a minute later, when another cluster that starts would have found them free
    as well: so each takes them from a block of its own.

    Raises:
        ShoalError: there is no block with so many.
    """
    first = port % len(_BLOCKS)
    for block in _BLOCKS[first:] + _BLOCKS[:first]:
        try:
            claim = _claim(f"inner-{block.start}")
        except OSError:
            continue
        free = [one for one in block if port_is_free("127.0.0.1", one)]
        if len(free) >= count:
            return InnerPorts(free[:count], claim)
        if claim is not None:
            claim.close()
    raise ShoalError(
        f"no {count} ports together are free on 127.0.0.1 between {_BLOCKS[0].start} and {_BLOCKS[-1].stop}: "
        "stop a cluster of this machine, or what else listens there"
    )


def _named_ports(settings: ServeSettings) -> Iterator[tuple[str, int]]:
    """Settings and their ports, each port once."""
    seen: set[int] = set()
    for field in _FIELDS:
        port: int | None = getattr(settings, field)
        if port is not None and port not in seen:
            seen.add(port)
            yield field, port


def _is_claimed(name: str) -> bool:
    """Looked up, not tried: for a moment a trial would be a claim, and refuse the port to whoever wants it."""
    if sys.platform != "linux":
        return False
    return any(line.endswith(f" @{_PREFIX}{name}") for line in _SOCKETS.read_text().splitlines())


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _claim(name: str) -> socket.socket | None:
    """Hold a name that no other process of this machine can hold, until it is closed; None on macOS.

    Raises:
        OSError: another has it.
    """
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{_PREFIX}{name}")  # no file: it goes with its process, however that ends
    except OSError:
        claim.close()
        raise
    return claim
