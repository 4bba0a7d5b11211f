"""The ingress as an ASGI application: routes, error handlers, lifespan."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.capacity import load_report, rate_limit_headers
from router.edge import EdgeMiddleware
from router.ingress import Ingress
from router.ledger import KEPT_S
from router.membership import Membership
from router.openai import errors
from router.openai.body import read_body
from router.openai.chat import answer_chat
from router.openai.completions import answer_completion
from router.openai.document import body_of, document, with_models
from router.openai.embeddings import EmbeddingBody, answer_embeddings
from router.openai.header_wishes import header_wishes
from router.openai.health import HEALTH_RETRY_S, deep_health, health
from router.openai.heartbeat import Sleep
from router.openai.metrics import Metrics
from router.openai.models import model_list, model_object
from router.openai.responses import answer_response, count_input_tokens
from router.openai.responses_schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from router.openai.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from router.tenancy.door import DoorMiddleware
from router.tenancy.key_source import KeySource
from router.ui.data import PAGE_HEADERS, page, snapshot
from workers.engine.errors import ShoalError

_Body = TypeVar("_Body", bound=BaseModel)

EXPOSED_HEADERS = [
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
]
"""What a script in a browser may read of an answer."""


def build_app(
    ingress: Ingress,
    membership: Membership | None = None,
    *,
    sends_request_id: bool = True,
    sleep: Sleep = asyncio.sleep,
) -> FastAPI:
    """The OpenAI HTTP API in front of ``ingress``.

    With a membership the application's lifespan starts and stops the ingress; without, whoever made it does.

    Args:
        sends_request_id: False where the server before it puts ``x-request-id`` into answers, as Ray Serve does.
        sleep: by which silent streams measure time.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if membership is not None:
            await ingress.start(membership)
        try:
            yield
        finally:
            if membership is not None:
                await ingress.stop()

    app = FastAPI(title="Shoal", version="1", lifespan=lifespan, redirect_slashes=False)
    metrics = Metrics(ingress, time.perf_counter)
    started = int(time.time())
    max_body_bytes = ingress.limits.max_body_bytes

    async def read_wish(request: Request, model: type[_Body]) -> _Body:
        """A generation's body; what its headers ask for is in the request's state then."""
        request.state.wishes = header_wishes(request.scope["headers"])
        return await read_body(request, model, max_body_bytes)

    @app.post("/v1/chat/completions", openapi_extra=body_of("ChatBody"))
    async def chat_completions(request: Request) -> Response:
        body = await read_wish(request, ChatBody)
        return await answer_chat(ingress, metrics, body, uuid.uuid4().hex, int(time.time()))

    @app.post("/v1/completions", openapi_extra=body_of("CompletionBody"))
    async def completions(request: Request) -> Response:
        body = await read_wish(request, CompletionBody)
        return await answer_completion(ingress, metrics, body, uuid.uuid4().hex, int(time.time()))

    @app.post("/v1/responses", openapi_extra=body_of("ResponsesBody"))
    async def responses(request: Request) -> Response:
        body = await read_wish(request, ResponsesBody)
        return await answer_response(ingress, metrics, body, uuid.uuid4().hex, int(time.time()))

    @app.post("/v1/responses/input_tokens", openapi_extra=body_of("ResponsesBody"))
    async def response_input_tokens(request: Request) -> Response:
        body = await read_wish(request, ResponsesBody)
        return errors.json_response(
            await count_input_tokens(ingress, request.state.tenant, body, uuid.uuid4().hex)
        )

    @app.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"])
    async def stored_response(response_id: str) -> Response:
        raise errors.NotStored(response_id)

    @app.post("/v1/embeddings", openapi_extra=body_of("EmbeddingBody"))
    async def embeddings(request: Request) -> Response:
        body = await read_wish(request, EmbeddingBody)
        return await answer_embeddings(ingress, metrics, body, uuid.uuid4().hex)

    @app.get("/v1/shoal/requests/{request_id}")
    async def explain_request(request: Request, request_id: str) -> Response:
        told = await ingress.recall(request_id, request.state.tenant.name)
        if not told:
            raise errors.RequestNotKnown(request_id, KEPT_S)
        return Response(told, media_type="application/json")

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        return errors.json_response(model_list(ingress, request.state.tenant, started))

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        return errors.json_response(model_object(ingress.model(model_id), model_id, started))

    @app.post("/tokenize", openapi_extra=body_of("TokenizeBody"))
    async def post_tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, max_body_bytes)
        return errors.json_response(await tokenize(ingress, request.state.tenant, body))

    @app.post("/detokenize", openapi_extra=body_of("DetokenizeBody"))
    async def post_detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, max_body_bytes)
        return errors.json_response(await detokenize(ingress, request.state.tenant, body))

    @app.get("/version")
    async def get_version() -> Response:
        return errors.json_response({"version": version("shoal")})

    @app.get("/load")
    async def get_load() -> Response:
        return errors.json_response(load_report(ingress))

    @app.get("/health")
    async def get_health(deep: bool = False) -> Response:
        status, body = await deep_health(ingress, uuid.uuid4().hex) if deep else health(ingress)
        return errors.json_response(body, status, {"retry-after": HEALTH_RETRY_S} if status == 503 else None)

    @app.get("/health/live")
    async def get_live() -> Response:
        return errors.json_response({"status": "live"})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/ui", include_in_schema=False)
    async def get_ui() -> Response:
        return Response(page(), media_type="text/html", headers=PAGE_HEADERS)

    @app.get("/ui/data", include_in_schema=False)
    async def get_ui_data() -> Response:
        return errors.json_response(snapshot(ingress, metrics))

    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")  # the server leaves the body out (RFC 9110, 9.3.2)
    app.add_exception_handler(ShoalError, errors.answer_shoal_error)
    app.add_exception_handler(HTTPException, errors.answer_http_error)
    app.add_exception_handler(ClientDisconnect, errors.answer_nobody)
    app.add_exception_handler(RequestValidationError, errors.answer_bad_query)
    app.state.sleep = sleep
    app.state.metrics = metrics
    app.state.ingress = ingress
    source = KeySource(ingress.config.keys, ingress.config.key_file, time.monotonic)
    app.state.keys = source
    app.openapi = lambda: with_models(  # type: ignore[method-assign]  # FastAPI's own way to change it
        document(app, asks_for_keys=source.ring() is not None),
        [name for model in ingress.models for name in model.config.served_names],
    )
    app.add_middleware(DoorMiddleware, source=source)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=ingress.config.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    app.add_middleware(
        EdgeMiddleware,
        count=lambda route, status: _count(metrics, route, status),
        api_headers=lambda scope: rate_limit_headers(ingress, scope["state"].get("tenant")),
        sends_request_id=sends_request_id,
    )
    return app


def _count(metrics: Metrics, route: str, status: int) -> None:
    metrics.http_requests.labels(route, str(status)).inc()
