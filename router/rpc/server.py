"""The gRPC server of an ingress: generation, health and reflection on one port.

All ingress processes of a host listen on the same port; the kernel deals connections out to them. Tokens pass
through no proxy and no Serve handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.config import RpcConfig
from router.ingress import Ingress
from router.openai.health import health
from router.openai.metrics import Metrics
from router.rpc.proto import inference_pb2
from router.rpc.service import InferenceService
from router.tenancy.key_source import KeySource

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

WATCH_PERIOD_S = 1.0
"""How often a watched health is looked at; watchers are few."""


class HealthService(health_pb2_grpc.HealthServicer):
    """The standard health service: SERVING while any model can be served."""

    def __init__(self, ingress: Ingress, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._ingress = ingress
        self._sleep = sleep

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state now."""
        if request.service not in ("", INFERENCE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now, and whenever it has changed."""
        told: int | None = None
        is_known = request.service in ("", INFERENCE)
        while True:
            status = self._status() if is_known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await self._sleep(WATCH_PERIOD_S)

    def _status(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        is_ready = health(self._ingress)[0] == 200
        kinds = health_pb2.HealthCheckResponse
        return kinds.SERVING if is_ready else kinds.NOT_SERVING


async def start_rpc_server(
    config: RpcConfig, ingress: Ingress, metrics: Metrics, keys: KeySource
) -> tuple[grpc.aio.Server, int]:
    """Listen for users.

    Returns:
        The server and its port.

    Raises:
        OSError: the address cannot be bound, or the certificate cannot be read.
    """
    most = ingress.limits.max_body_bytes  # gRPC's own answer to a longer message is RESOURCE_EXHAUSTED
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", most)])
    generate = grpc.unary_stream_rpc_method_handler(
        InferenceService(ingress, metrics, keys).Generate,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(INFERENCE, {"Generate": generate})
    server.add_generic_rpc_handlers((handler,))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(ingress), server)
    reflection.enable_server_reflection((INFERENCE, HEALTH, reflection.SERVICE_NAME), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.key is not None and config.certificate is not None:
            pair = (config.key.read_bytes(), config.certificate.read_bytes())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen for gRPC on {address}: {error}") from error
    await server.start()
    return server, port
