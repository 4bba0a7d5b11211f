"""The step channel within one Linux machine: a shared ring, doorbells, and a Unix socket for each rank.

The socket carries the descriptors once, at the start; from then on it is silent, and its end of file says
that the peer is dead, SIGKILL included. The memory is a memfd and the socket's usual name abstract, so
nothing is left behind however the processes end.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from functools import partial

from workers.channel.link import LOOK_S, UNIX, BrainLost
from workers.channel.ring import RingReader, RingWriter, new_counter, new_memory
from workers.engine.errors import RankLost

RING_BYTES = (
    1 << 20
)  # a plan of 256 decodes takes 3 KiB, a fresh row 2-5 bytes a token; longer ones flow through
_HELLO = struct.Struct("<4sI")  # magic, rank
_MAGIC = b"SHS1"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7), SO_PEERCRED)
_RETRY_S = 0.01
_DEAD = select.POLLHUP | select.POLLERR | select.POLLNVAL


class LocalBrainLink:
    """The brain's end: writes plans once for all ranks, reads results of rank 0."""

    def __init__(self, endpoint: str, num_ranks: int, ring_bytes: int = RING_BYTES) -> None:
        """Listen at ``endpoint``; ranks get in by ``wait_for_ranks``."""
        self._num_ranks = num_ranks
        self._address = _address(endpoint)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(self._address)
        self._listener.listen(num_ranks)
        self._sockets: dict[int, socket.socket] = {}
        self._doorbells = [new_counter() for _ in range(num_ranks)]
        self._credits = [new_counter() for _ in range(num_ranks)]
        self._result_doorbell, self._result_credit = new_counter(), new_counter()
        self._plan_fd, self._result_fd = new_memory(ring_bytes), new_memory(ring_bytes)
        self._writer = RingWriter(self._plan_fd, self._doorbells, self._credits)
        self._reader = RingReader(self._result_fd, self._result_doorbell, self._result_credit)
        counters = (*self._doorbells, *self._credits, self._result_doorbell, self._result_credit)
        # Python knows them as numbers alone: a link that is dropped, not closed, would leave them open.
        self._close_fds = weakref.finalize(self, _close_all, (*counters, self._plan_fd, self._result_fd))
        self._close_fds.atexit = False
        self._events = select.epoll()
        self._events.register(self._result_doorbell, select.EPOLLIN)
        self._closed = False

    def wait_for_ranks(self, timeout_s: float) -> None:
        """See ``BrainLink``. Connections of other users and of unknown ranks are turned away."""
        deadline_s = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        guests: dict[int, socket.socket] = {}  # connected, but have not said who they are
        while len(self._sockets) < self._num_ranks:
            events = poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
            if not events:
                missing = sorted(set(range(self._num_ranks)) - set(self._sockets))
                raise RankLost(f"ranks {missing} did not connect within {timeout_s:g} s")
            for fd, _ in events:
                if fd == self._listener.fileno():
                    guest, _ = self._listener.accept()
                    guests[guest.fileno()] = guest
                    poller.register(guest, select.POLLIN)
                elif fd in guests:
                    poller.unregister(fd)
                    rank = self._seat(guests.pop(fd))
                    if rank is not None:
                        poller.register(self._sockets[rank], select.POLLIN)
                else:
                    raise RankLost(f"rank {self._rank_of(fd)} went away while others were awaited")
        for guest in guests.values():
            guest.close()
        self._stop_listening()

    def broadcast(self, payload: bytes, look: Callable[[], None] | None = None) -> None:
        """See ``BrainLink``."""
        self._writer.write(payload, partial(self._wait_for_room, look))

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See ``BrainLink``."""
        while (payload := self._reader.read()) is None:
            events = self._events.poll(-1 if timeout_s is None else timeout_s)
            if not events:
                return None
            if all(fd != self._result_doorbell for fd, _ in events):
                raise RankLost(f"rank {self._rank_of(events[0][0])} is gone")
        return payload

    def filenos(self) -> tuple[int, ...]:
        """See ``BrainLink``."""
        return (self._events.fileno(),)

    def close(self) -> None:
        """See ``BrainLink``."""
        if self._closed:
            return
        self._closed = True
        self._stop_listening()
        self._events.close()
        for peer in self._sockets.values():
            peer.close()
        self._writer.close()
        self._reader.close()
        self._close_fds()

    def _seat(self, guest: socket.socket) -> int | None:
        """Give a rank its descriptors; turn away whoever is none."""
        _, uid, _ = _CREDENTIALS.unpack(
            guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        hello = guest.recv(_HELLO.size, socket.MSG_DONTWAIT)
        magic, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        is_welcome = uid == os.getuid() and magic == _MAGIC
        if not is_welcome or rank in self._sockets or rank >= self._num_ranks:
            guest.close()
            return None
        fds = [self._plan_fd, self._doorbells[rank], self._credits[rank]]
        if rank == 0:
            fds += [self._result_fd, self._result_doorbell, self._result_credit]
        socket.send_fds(guest, [_MAGIC], fds)
        self._sockets[rank] = guest
        self._events.register(guest, select.EPOLLIN | select.EPOLLRDHUP)
        return int(rank)

    def _wait_for_room(self, look: Callable[[], None] | None) -> None:
        """Sleep until a rank has read something, or for ``LOOK_S``.

        Results are taken in meanwhile: rank 0 may wait for room itself, and reads no plan until it has some.
        """
        poller = select.poll()
        for fd in (*self._credits, self._result_doorbell):
            poller.register(fd, select.POLLIN)
        for peer in self._sockets.values():
            poller.register(peer, select.POLLIN)
        events = poller.poll(LOOK_S * 1000)
        for fd, _ in events:
            if fd == self._result_doorbell:
                self._reader.pull()
            elif fd not in self._credits:
                raise RankLost(f"rank {self._rank_of(fd)} is gone")
        if not events and look is not None:
            look()

    def _rank_of(self, fd: int) -> int:
        return next(rank for rank, peer in self._sockets.items() if peer.fileno() == fd)

    def _stop_listening(self) -> None:
        self._listener.close()
        if isinstance(self._address, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)


class LocalRankLink:
    """A rank's end: reads plans; rank 0 writes results."""

    def __init__(self, endpoint: str, rank: int, timeout_s: float) -> None:
        """Connect and take the descriptors; see ``connect``."""
        deadline_s = time.monotonic() + timeout_s
        self._socket = _dial(endpoint, deadline_s)
        self._closed = False
        self._socket.sendall(_HELLO.pack(_MAGIC, rank))
        self._socket.settimeout(max(_RETRY_S, deadline_s - time.monotonic()))
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, len(_MAGIC), 6)
        except OSError as error:
            raise BrainLost(f"the brain at {endpoint} did not answer rank {rank}: {error}") from error
        if message != _MAGIC:
            raise BrainLost(f"the brain at {endpoint} turned rank {rank} away")
        plan_fd, self._doorbell, credit, *result_fds = fds
        self._counters = [self._doorbell, credit]
        self._reader = RingReader(plan_fd, self._doorbell, credit)
        os.close(plan_fd)
        self._writer: RingWriter | None = None
        if result_fds:
            result_fd, result_doorbell, self._result_credit = result_fds
            self._writer = RingWriter(result_fd, [result_doorbell], [self._result_credit])
            self._counters += [result_doorbell, self._result_credit]
            os.close(result_fd)
        self._close_fds = weakref.finalize(self, _close_all, tuple(self._counters))
        self._close_fds.atexit = False
        self._events = select.epoll()
        self._events.register(self._doorbell, select.EPOLLIN)
        self._events.register(self._socket, select.EPOLLIN | select.EPOLLRDHUP)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See ``RankLink``."""
        while (payload := self._reader.read()) is None:
            events = self._events.poll(-1 if timeout_s is None else timeout_s)
            if not events:
                return None
            if all(fd != self._doorbell for fd, _ in events):
                raise BrainLost("the brain is gone")
        return payload

    def send(self, payload: bytes) -> None:
        """See ``RankLink``."""
        assert self._writer is not None, "only rank 0 answers"
        self._writer.write(payload, self._wait_for_room)

    def filenos(self) -> tuple[int, ...]:
        """See ``RankLink``."""
        return (self._events.fileno(),)

    def close(self) -> None:
        """See ``RankLink``."""
        if self._closed:
            return
        self._closed = True
        self._events.close()
        self._socket.close()
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
        self._close_fds()

    def _wait_for_room(self) -> None:
        """Sleep until the brain has read something."""
        poller = select.poll()
        poller.register(self._result_credit, select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        if all(fd != self._result_credit for fd, _ in poller.poll()):
            raise BrainLost("the brain is gone")


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def _address(endpoint: str) -> str | bytes:
    """The socket address: an abstract name as bytes with a leading zero, a path as text."""
    name = endpoint.removeprefix(UNIX)
    return b"\0" + name[1:].encode() if name.startswith("@") else name


def _dial(endpoint: str, deadline_s: float) -> socket.socket:
    """Connect, again and again until the brain listens or time is up."""
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            peer.connect(_address(endpoint))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            peer.close()
            if time.monotonic() >= deadline_s:
                raise BrainLost(f"no brain listens at {endpoint}") from error
            time.sleep(_RETRY_S)
        else:
            return peer
