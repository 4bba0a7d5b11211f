"""Messages over a stream socket, each preceded by its length; the synchronous, never-waiting end."""

from __future__ import annotations

import contextlib
import socket

LENGTH_BYTES = 4
_CHUNK_BYTES = 1 << 18


def frame(payload: bytes) -> bytes:
    """``payload`` as it travels."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FramedSocket:
    """One end of a stream of messages. Owns the socket, which it makes non-blocking."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._inbound = bytearray()
        self._outbound = bytearray()
        self.is_open = True
        """False once the peer has hung up."""

    @property
    def has_unsent(self) -> bool:
        """True while ``flush`` has something to do."""
        return bool(self._outbound)

    def fileno(self) -> int:
        """To be polled for reading, and for writing while ``has_unsent``."""
        return self._peer.fileno()

    def send(self, payload: bytes) -> None:
        """Queue a message and send what the socket takes now; the rest goes with ``flush``."""
        self._outbound += frame(payload)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._outbound:
                del self._outbound[: self._peer.send(self._outbound)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.is_open = False
            self._outbound.clear()

    def receive(self, max_messages: int | None = None) -> list[bytes]:
        """The messages that have arrived whole; see ``is_open`` for whether more can come.

        Args:
            max_messages: leave what comes after as many for the next call; None takes all.
        """
        self._pull()
        payloads: list[bytes] = []
        start = 0
        while len(self._inbound) >= start + LENGTH_BYTES and len(payloads) != max_messages:
            body = start + LENGTH_BYTES
            end = body + int.from_bytes(self._inbound[start:body], "little")
            if len(self._inbound) < end:
                break
            payloads.append(bytes(self._inbound[body:end]))
            start = end
        del self._inbound[:start]
        return payloads

    def close(self) -> None:
        """Send what is left, waiting at most a second, and hang up. Safe to call twice."""
        if self._peer.fileno() < 0:
            return
        self._peer.settimeout(1.0)
        with contextlib.suppress(OSError):
            self._peer.sendall(self._outbound)
        self._outbound.clear()
        self._peer.close()
        self.is_open = False

    def _pull(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    chunk = self._peer.recv(_CHUNK_BYTES)
                except ConnectionResetError:
                    chunk = b""
                self._inbound += chunk
                if not chunk:
                    self.is_open = False
                if len(chunk) < _CHUNK_BYTES:
                    return
