"""The step channel across machines: ZeroMQ, a ROUTER in the brain and a DEALER in each rank.

A monitor on each socket tells when the other side hangs up; heartbeats tell when its machine falls silent.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import recv_monitor_message

from workers.channel.link import BrainLost
from workers.engine.errors import RankLost

_HELLO = b"hello"
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000  # without an answer to heartbeats, the other machine counts as dead
_NUM_PROBES, _PROBE_S = 10, 0.01


def _split(endpoint: str) -> tuple[str, bytes]:
    """Address and key."""
    address, _, key = endpoint.partition("#")
    return address, key.encode()


class _Socket:
    """A ZeroMQ socket and its monitor."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._closed = False

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        """The next message; None if none came in time. Raises ConnectionResetError if the peer hung up."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self.socket in ready:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            raise ConnectionResetError("the peer hung up")
        return None

    def filenos(self) -> tuple[int, ...]:
        return self.socket.fileno(), self._monitor.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.socket.disable_monitor()
        self._context.destroy(linger=0)


class RemoteBrainLink:
    """The brain's end. See ``BrainLink`` for what the methods promise."""

    def __init__(self, endpoint: str, num_ranks: int) -> None:
        """Bind to ``endpoint``."""
        address, self._key = _split(endpoint)
        self._names = [_name(rank, self._key) for rank in range(num_ranks)]
        self._link = _Socket(zmq.ROUTER)
        self._link.socket.set(zmq.ROUTER_MANDATORY, 1)
        self._link.socket.bind(address)
        self._connected: set[bytes] = set()

    def wait_for_ranks(self, timeout_s: float) -> None:
        """See ``BrainLink``. Who does not know the key is not heard."""
        deadline_s = time.monotonic() + timeout_s
        while len(self._connected) < len(self._names):
            try:
                message = self._link.receive(max(0.0, deadline_s - time.monotonic()))
            except ConnectionResetError:
                self._find_lost(self._connected)
                continue
            if message is None:
                missing = [rank for rank, name in enumerate(self._names) if name not in self._connected]
                raise RankLost(f"ranks {missing} did not connect within {timeout_s:g} s")
            if message[0] in self._names and message[1:] == [_HELLO]:
                self._connected.add(message[0])
        self.broadcast(_HELLO)

    def broadcast(self, payload: bytes, look: Callable[[], None] | None = None) -> None:
        """See ``BrainLink``. Never waits, and so never looks: what is not sent yet is kept, however much it is."""
        for name in self._names:
            self._send(name, payload)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See ``BrainLink``."""
        while True:
            try:
                message = self._link.receive(timeout_s)
            except ConnectionResetError:
                self._find_lost(self._names)
                continue
            if message is None:
                return None
            if message[0] == self._names[0]:
                return message[1]

    def filenos(self) -> tuple[int, ...]:
        """See ``BrainLink``."""
        return self._link.filenos()

    def close(self) -> None:
        """See ``BrainLink``."""
        self._link.close()

    def _send(self, name: bytes, payload: bytes) -> None:
        try:
            self._link.socket.send_multipart((name, payload))
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise RankLost(f"rank {self._names.index(name)} is gone") from error

    def _find_lost(self, names: Iterable[bytes]) -> None:
        """Raise ``RankLost`` if it was one of ``names`` that hung up, and no stranger.

        The monitor speaks a little before the socket knows that the peer is gone, so ask for a while.
        """
        for _ in range(_NUM_PROBES):
            for name in names:
                self._send(name, b"")
            time.sleep(_PROBE_S)


class RemoteRankLink:
    """A rank's end. See ``RankLink`` for what the methods promise."""

    def __init__(self, endpoint: str, rank: int, timeout_s: float) -> None:
        """Connect and wait until the brain has all ranks."""
        address, key = _split(endpoint)
        self._link = _Socket(zmq.DEALER)
        self._link.socket.set(zmq.IDENTITY, _name(rank, key))
        self._link.socket.connect(address)
        self._link.socket.send(_HELLO)
        deadline_s = time.monotonic() + timeout_s
        try:
            welcome = self._link.receive(max(0.0, deadline_s - time.monotonic()))
            while welcome == [b""]:
                welcome = self._link.receive(max(0.0, deadline_s - time.monotonic()))
        except ConnectionResetError:
            welcome = None
        if welcome != [_HELLO]:
            self.close()
            raise BrainLost(f"no brain at {endpoint} took rank {rank} in")

    def receive(self, timeout_s: float | None) -> bytes | None:
        """See ``RankLink``."""
        while True:
            try:
                message = self._link.receive(timeout_s)
            except ConnectionResetError as error:
                raise BrainLost("the brain is gone") from error
            if message is None:
                return None
            if message[0]:  # an empty one only asks whether we are here
                return message[0]

    def send(self, payload: bytes) -> None:
        """See ``RankLink``."""
        self._link.socket.send(payload)

    def filenos(self) -> tuple[int, ...]:
        """See ``RankLink``."""
        return self._link.filenos()

    def close(self) -> None:
        """See ``RankLink``."""
        self._link.close()


def _name(rank: int, key: bytes) -> bytes:
    """What a rank calls itself. It must not begin with a zero byte, which ZeroMQ keeps for itself."""
    return b"rank-%d-%b" % (rank, key)
