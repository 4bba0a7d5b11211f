"""How the command that started a cluster has its ingresses end their streams before it ends them.

Each ingress process of a local cluster listens on a socket in the cluster's folder; told a time, it lets nobody in any
more, waits, and answers with the number of requests that were not done by then. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

Drain = Callable[[float], Awaitable[int]]

_ANSWER_S = 15.0
"""For an ingress to answer once the time that it was told is over."""


async def listen_for_drain(folder: Path, drain: Drain) -> asyncio.Server:
    """Have ``drain`` called, in this process, when the driver of the cluster in ``folder`` says so."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_left = await drain(float(await reader.readline()))
        writer.write(b"%d\n" % num_left)
        with contextlib.suppress(ConnectionError):  # the driver would not wait any more
            await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(on_connection, folder / f"ingress-{os.getpid()}.sock")


def drain_ingresses(folder: Path, timeout_s: float) -> int:
    """Drain all ingresses of the cluster in ``folder``, side by side. Blocks.

    Returns:
        Requests that were not done after ``timeout_s``; they ended with an error.
    """
    with contextlib.ExitStack() as stack:
        asked = []
        for path in folder.glob("ingress-*.sock"):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(timeout_s + _ANSWER_S)
            with contextlib.suppress(OSError):  # its process has ended
                connection.connect(str(path))
                connection.sendall(b"%f\n" % timeout_s)
                asked.append(connection)
        return sum(_answer(connection) for connection in asked)


def _answer(connection: socket.socket) -> int:
    try:
        return int(connection.makefile().readline() or 0)
    except OSError:
        return 0  # it was lost meanwhile, and its requests with it
