"""Which replicas exist: replica id -> gRPC address, by group, handed over between threads.

Ray Serve tells its request router, which runs on a thread of its own; the ingress listens on its asyncio
loop. ``shared`` is what both import: the only module state of this floor. Each set has a version, counted in this
process: what has seen a set needs no earlier one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

Members = dict[str, str]
Listener = Callable[[Members, int], None]
"""Takes a set of replicas and its version."""


class Membership:
    """Sets of replicas by group; ``publish`` from any thread, listeners run on their own loop."""

    def __init__(self, members: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Members] = {group: dict(found) for group, found in (members or {}).items()}
        self._versions: dict[str, int] = {}
        self._listeners: dict[str, list[tuple[asyncio.AbstractEventLoop, Listener]]] = {}

    def members(self, group: str) -> Members:
        """The replicas of ``group`` now: replica id -> ``host:port``."""
        with self._lock:
            return dict(self._members.get(group, {}))

    def version(self, group: str) -> int:
        """How often the replicas of ``group`` have changed."""
        with self._lock:
            return self._versions.get(group, 0)

    def publish(self, group: str, members: Mapping[str, str]) -> None:
        """Replace the replicas of ``group`` and tell its listeners if anything changed."""
        with self._lock:
            if self._members.get(group) == members:
                return
            self._members[group] = dict(members)
            version = self._versions[group] = self._versions.get(group, 0) + 1
            for loop, listener in self._listeners.get(group, []):
                if not loop.is_closed():
                    # Queued under the lock, so that listeners see sets in the order published.
                    loop.call_soon_threadsafe(listener, dict(members), version)

    def listen(self, group: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` on the running loop, with the present set at once and after each change.

        Returns:
            A function that ends it.
        """
        entry = (asyncio.get_running_loop(), listener)
        with self._lock:
            self._listeners.setdefault(group, []).append(entry)
            members = dict(self._members.get(group, {}))
            version = self._versions.get(group, 0)
        listener(members, version)

        def stop() -> None:
            with self._lock:
                if entry in self._listeners.get(group, []):
                    self._listeners[group].remove(entry)

        return stop


class StaticMembership(Membership):
    """A fixed set of replicas of the nameless group: for tests, and for running without Ray."""

    def __init__(self, members: Mapping[str, str]) -> None:
        super().__init__({"": members})


_SHARED = Membership()


def shared() -> Membership:
    """The membership of this process, which Serve's router thread and the ingress both use."""
    return _SHARED
