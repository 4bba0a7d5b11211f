"""The replica's end of a brain process, for asyncio.

    brain = BrainClient(BrainConfig(engine=EngineConfig(...), num_ranks=2))
    endpoint = await brain.start()            # ranks connect here: serve_steps(rank, endpoint, tp_rank)
    await brain.started()                     # all have
    brain.submit(request)
    async for update in brain.updates():      # StepUpdate, QueueShown, Pong, CacheSnapshot; Failed is the last
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
import tempfile
from collections.abc import AsyncIterator, Iterable

import msgspec

from workers.brain_messages import (
    BrainConfig,
    Cancel,
    Command,
    Failed,
    Load,
    Ping,
    Release,
    ShowQueue,
    SnapshotCache,
    Started,
    Stop,
    Submit,
    Update,
)
from workers.channel.link import new_endpoint
from workers.child_module import start_module
from workers.engine.request import EngineRequest
from workers.framing import LENGTH_BYTES, frame

__all__ = ["BrainClient", "BrainConfig", "BrainFailed"]

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
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle_load: Load | None = None

    @property
    def pid(self) -> int | None:
        """The brain's process id; None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the process; negative for a signal, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def idle_load(self) -> Load:
        """The load of the engine as it was when all ranks had connected."""
        assert self._idle_load is not None, "started() has not returned yet"
        return self._idle_load

    async def start(self) -> str:
        """Start the process and return the endpoint where its ranks shall connect ("" if it has none)."""
        config = self._config = self._with_endpoint(self._config)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        try:
            self._process = await asyncio.to_thread(_spawn, theirs)
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_SOCKET_BYTES)
        self._send(config)
        return config.step_endpoint or ""

    async def started(self) -> None:
        """Return once all ranks are connected. To be awaited once, before ``updates``.

        Raises:
            BrainFailed: the process ended, or not all ranks came within ``config.start_timeout_s``.
        """
        update = await self._receive()
        if not isinstance(update, Started):
            raise BrainFailed(update.message if isinstance(update, Failed) else f"it was stopped ({update})")
        self._idle_load = update.load

    def submit(self, request: EngineRequest) -> None:
        """Have a request taken up; what is wrong with it comes as an output with finish reason ``error``."""
        self._send(Submit(request))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Outputs already under way may still arrive."""
        self._send(Cancel(list(request_ids)))

    def release(self, request_ids: Iterable[str]) -> None:
        """Ask for requests back that have not begun; a later ``StepUpdate`` says of each whether it was given."""
        self._send(Release(list(request_ids)))

    def show_queue(self, prefix: str, least_wait_s: float, most: int) -> None:
        """Ask for a ``QueueShown``."""
        self._send(ShowQueue(prefix, least_wait_s, most))

    def ping(self, sent_s: float) -> None:
        """Ask for a ``Pong``; ``sent_s`` comes back in it."""
        self._send(Ping(sent_s))

    def request_snapshot(self) -> None:
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
            if self._directory is not None:
                self._directory.cleanup()

    def kill(self) -> None:
        """End the process at once; its ranks see the channel break. Safe to call at any time."""
        if self._process is not None:
            self._process.kill()

    def _with_endpoint(self, config: BrainConfig) -> BrainConfig:
        """``config`` with an endpoint of this machine, where it needs one and has none."""
        if config.num_ranks == 0 or config.step_endpoint is not None:
            return config
        if sys.platform != "linux":  # there the socket needs a file
            self._directory = tempfile.TemporaryDirectory(prefix="shoal-")
        endpoint = new_endpoint(self._directory.name if self._directory else "")
        return msgspec.structs.replace(config, step_endpoint=endpoint)

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
        return Failed(f"the engine process ended with exit code {exit_code}")


def _spawn(stdin: socket.socket) -> subprocess.Popen[bytes]:
    return start_module("workers.brain", stdin.fileno())
