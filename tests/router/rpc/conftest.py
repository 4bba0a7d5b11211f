"""An ingress's gRPC server in this process, and channels to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from router.config import RpcConfig
from router.rpc.server import start_rpc_server
from router.scripted_replica import ScriptedReplica

Connect = Callable[..., Awaitable[tuple[Any, grpc.aio.Channel]]]


@pytest.fixture
async def connect(make_edge: Any) -> AsyncIterator[Connect]:
    """An ingress with a gRPC server, and a channel to it."""
    closing: list[Any] = []

    async def make(*replicas: ScriptedReplica, **options: Any) -> tuple[Any, grpc.aio.Channel]:
        edge = await make_edge(*replicas, **options)
        server, port = await start_rpc_server(
            RpcConfig("127.0.0.1", 0), edge.ingress, edge.app.state.metrics, edge.app.state.keys
        )
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        closing.append((server, channel))
        return edge, channel

    yield make
    for server, channel in closing:
        await channel.close()
        await server.stop(None)
