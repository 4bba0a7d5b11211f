"""The replica's end of a brain process, for asyncio.

    brain = BrainClient(BrainConfig(engine=EngineConfig(...), step_endpoint=endpoint, num_ranks=1))
    await brain.start()                       # returns once the ranks are connected
    brain.submit(request)
    async for update in brain.updates():      # StepUpdate, Pong, CacheSnapshot; Failed is always the last
        ...
    await brain.stop()

Knows no gRPC and no Ray. The socket between the two is the brain's standard input, so neither end can outlive
the other unnoticed, and nothing is left on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable

import msgspec

from workers.brain_messages import (
    BrainConfig,
    Cancel,
    Command,
    Failed,
    Ping,
    SnapshotCache,
    Started,
    Stop,
    Submit,
    Update,
)
from workers.engine.request import EngineRequest
from workers.framing import LENGTH_BYTES, frame

_STOP_GRACE_S = 5.0
_SOCKET_BYTES = (
    1 << 20
)  # some 50 steps of 256 tokens, so that a pause of the replica does not reach the brain


class BrainFailed(RuntimeError):
    """The brain process could not start, or ended before it was told to."""


class BrainClient:
    """Starts one brain process and speaks with it. Methods are for the event loop that called ``start``."""

    def __init__(self, config: BrainConfig) -> None:
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Update)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """The brain's process id; None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the process and return once all its ranks are connected.

        Raises:
            BrainFailed: it ended, or the ranks did not come within ``config.start_timeout_s``. It is gone.
        """
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        try:
            self._process = await asyncio.to_thread(_spawn, theirs)
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            self._send(self._config)
            update = await self._receive()
            if not isinstance(update, Started):
                raise BrainFailed(update.message if isinstance(update, Failed) else f"unexpected {update}")
        except BaseException:
            await self.stop()
            raise

    def submit(self, request: EngineRequest) -> None:
        """Have a request taken up; what is wrong with it comes as an output with finish reason ``error``."""
        self._send(Submit(request))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Outputs already under way may still arrive."""
        self._send(Cancel(list(request_ids)))

    def ping(self, sent_s: float) -> None:
        """Ask for a ``Pong``; ``sent_s`` comes back in it."""
        self._send(Ping(sent_s))

    def snapshot(self) -> None:
        """Ask for a ``CacheSnapshot``: it fits between the updates before and after it."""
        self._send(SnapshotCache())

    async def updates(self) -> AsyncIterator[Update]:
        """Yield what the brain says, in order. For one consumer.

        Ends after ``stop``. If the process ends by itself, the last update is ``Failed``.
        """
        while True:
            update = await self._receive()
            if update is None:
                return
            yield update
            if isinstance(update, Failed):
                return

    async def stop(self) -> None:
        """Let the ranks go and end the process, by force after a grace. Safe to call twice."""
        process, writer, self._writer = self._process, self._writer, None
        if process is None:
            return
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.write(frame(self._encoder.encode(Stop())))
                await writer.drain()
        try:
            await asyncio.to_thread(process.wait, _STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        finally:
            if writer is not None:
                writer.close()

    def _send(self, message: Command | BrainConfig) -> None:
        """Queue a message; of no effect once the brain is gone, which ``updates`` tells."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(self._encoder.encode(message)))

    async def _receive(self) -> Update | None:
        """The next update; ``Failed`` if the process ended by itself, None if it was told to."""
        assert self._reader is not None, "the brain is not started"
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            if self._writer is None:
                return None
        assert self._process is not None, "a brain that is read from was started"
        exit_code = await asyncio.to_thread(self._process.wait)
        return Failed(f"the brain process ended with exit code {exit_code}")


def _spawn(stdin: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "workers.brain"], stdin=stdin.fileno())
