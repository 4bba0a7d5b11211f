"""How an ingress opens a stream to a replica: by gRPC, unless it is told another way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import grpc.aio

from cluster.proto import shoal_pb2 as pb
from cluster.proto import shoal_pb2_grpc
from router.config import Timeouts

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a snapshot of a million blocks is 16 MB
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel makes a new connection, without old back-off
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_pings_without_data", 0),
]


class Call(Protocol):
    """The ingress's end of one stream."""

    async def read(self) -> Any:
        """The next ``pb.ReplicaMessage``, or ``grpc.aio.EOF``."""
        ...

    async def write(self, message: pb.IngressMessage) -> None:
        """Send a message; by one task at a time."""
        ...

    def cancel(self) -> Any:
        """End it."""
        ...


Connect = Callable[[str, Timeouts], AbstractAsyncContextManager[Call]]
"""Opens a stream to an address."""


@asynccontextmanager
async def connect_by_grpc(address: str, timeouts: Timeouts) -> AsyncIterator[Call]:
    """A gRPC stream on a channel of its own."""
    # A host that is gone or a process that is stopped closes no connection; it answers no ping either.
    ping_ms = round(timeouts.ping_s * 1000)
    pings = [("grpc.keepalive_time_ms", ping_ms), ("grpc.http2.ping_timeout_ms", ping_ms)]
    async with grpc.aio.insecure_channel(address, options=[*_OPTIONS, *pings]) as channel:
        yield shoal_pb2_grpc.ReplicaStub(channel).Attach()
