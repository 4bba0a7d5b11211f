"""What every kind of step channel offers, and which endpoint means which kind.

    unix:@name, unix:/path      shared memory and doorbells between processes of one Linux machine
    tcp://host:port#key         ZeroMQ between machines; ``key`` keeps strangers out
    ipc:///path#key             ZeroMQ within one machine where there is no memfd

One *brain link* broadcasts payloads to all ranks and receives payloads of rank 0; each rank has a *rank
link*. Payloads are bytes, not empty; order is kept; none is too long. A peer that dies is noticed at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable
from typing import Protocol

UNIX = "unix:"
LOOK_S = 0.5
"""Who waits for ranks that neither answer nor read looks at their processes so often."""


class BrainLost(RuntimeError):
    """The brain at the other end of a rank's link is gone; the rank must end."""


class BrainLink(Protocol):
    """The brain's end of a channel."""

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Return once all ranks are connected.

        Raises:
            RankLost: one did not come in time, or came and went.
        """
        ...

    def broadcast(self, payload: bytes, look: Callable[[], None] | None = None) -> None:
        """Send to every rank; wait, as long as it takes, where a slow rank leaves no room.

        Args:
            look: called each ``LOOK_S`` in which no rank made any; raises to give up, and the link with it.

        Raises:
            RankLost: a rank is gone.
        """
        ...

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next payload of rank 0; None if none came in time. ``timeout_s`` None waits for ever.

        Raises:
            RankLost: a rank is gone, and what rank 0 sent before has been received.
        """
        ...

    def filenos(self) -> tuple[int, ...]:
        """Descriptors to poll for reading: after ``receive(0)`` gave None, before anything else is sent."""
        ...

    def close(self) -> None:
        """Let the ranks go. Safe to call twice."""
        ...


class RankLink(Protocol):
    """A rank's end of a channel."""

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next payload of the brain; None if none came in time. ``timeout_s`` None waits for ever.

        Raises:
            BrainLost: the brain is gone, and what it sent before has been received.
        """
        ...

    def send(self, payload: bytes) -> None:
        """Send to the brain. For rank 0 alone.

        Raises:
            BrainLost: the brain is gone.
        """
        ...

    def filenos(self) -> tuple[int, ...]:
        """Descriptors to poll for reading: after ``receive(0)`` gave None, before anything else is sent."""
        ...

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        ...


def new_endpoint(directory: str) -> str:
    """An endpoint of this machine that nobody else has, of the fastest kind that it offers.

    Args:
        directory: private to the owner; used only where a socket needs a file.
    """
    name = secrets.token_hex(8)
    if sys.platform == "linux":
        return f"{UNIX}@shoal-steps-{name}"
    return f"ipc://{os.path.join(directory, 'steps')}#{name}"


def new_remote_endpoint(address: str) -> str:
    """An endpoint that ranks on other machines reach, at a port of ``address`` that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    host = f"[{address}]" if family == socket.AF_INET6 else address
    return f"tcp://{host}:{port}#{secrets.token_hex(16)}"


def listen(endpoint: str, num_ranks: int) -> BrainLink:
    """Open the brain's end of ``endpoint``; ranks may connect before or after."""
    if endpoint.startswith(UNIX):
        from workers.channel.local import LocalBrainLink

        return LocalBrainLink(endpoint, num_ranks)
    from workers.channel.remote import RemoteBrainLink

    return RemoteBrainLink(endpoint, num_ranks)


def connect(endpoint: str, rank: int, timeout_s: float) -> RankLink:
    """Open a rank's end of ``endpoint``, waiting for the brain to listen.

    Raises:
        BrainLost: no brain answered in time.
    """
    if endpoint.startswith(UNIX):
        from workers.channel.local import LocalRankLink

        return LocalRankLink(endpoint, rank, timeout_s)
    from workers.channel.remote import RemoteRankLink

    return RemoteRankLink(endpoint, rank, timeout_s)
