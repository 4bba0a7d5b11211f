"""How a generation becomes an HTTP answer: streamed or whole, cancelled when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.edge import Headers
from router.explanation import explanation
from router.generation import Delta, Generation
from router.ingress import Ingress
from router.openai import sse
from router.openai.errors import error_object, internal_error_object
from router.openai.header_wishes import HeaderWishes
from router.openai.heartbeat import EventWriter
from router.openai.metrics import GenerationTimer
from router.telemetry.request_log import log_request
from router.tenancy.gate import Admission
from router.tenancy.keys import ANYBODY, Tenant
from workers.engine.errors import ShoalError

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """One API's way to say what a generation yields."""

    def begin(self) -> bytes:
        """Events before the first token."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """Events for one delta; may be empty."""
        ...

    def finish(self, generation: Generation) -> bytes:
        """Events after the last token, without ``end_of_stream``."""
        ...

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Take deltas of an answer that is not streamed."""
        ...

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer that is not streamed, once all is collected."""
        ...


class GenerationResponse(Response):
    """Runs a generation and answers with it.

    Errors before the first byte are raised, for the application's error handlers; one that comes later is
    an event of the stream, which then ends without ``[DONE]``.
    """

    def __init__(
        self,
        generation: Generation,
        encoder: Encoder,
        timer: GenerationTimer,
        *,
        is_stream: bool,
        end_of_stream: bytes = sse.DONE,
        error_event: Callable[[dict[str, Any]], bytes] = sse.event,
    ) -> None:
        super().__init__()
        self.generation = generation
        self._encoder = encoder
        self.timer = timer
        self._is_stream = is_stream
        self._end_of_stream = end_of_stream
        self._error_event = error_event
        self._is_explained = False
        self._http_id = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; return early and quietly if the client disconnects."""
        wishes: HeaderWishes = scope["state"]["wishes"]
        self._is_explained = wishes.is_explained
        self._http_id = scope["state"]["request_id"]
        tenant: Tenant = scope["state"].get("tenant", ANYBODY)
        if wishes.session:
            self.generation.join_session(wishes.session)
        route = f"{scope['method']} {scope['path']}"
        with self.attended(scope["app"].state.ingress, tenant, self._http_id, route, scope["headers"]):
            if not self._is_stream:
                await unless_disconnected(receive, self._whole(send))
                return
            send_body = scope["state"].get("send_body")
            async with EventWriter(send, scope["app"].state.sleep, send_body) as writer:
                await unless_disconnected(receive, self._stream(writer))

    @contextmanager
    def attended(
        self, ingress: Ingress, tenant: Tenant, request_id: str, route: str, headers: Headers
    ) -> Iterator[None]:
        """Let the caller's request in, and tell ledger, trace, log and metrics of it, however it ends.

        Raises:
            Forbidden, RateLimited: its key does not reach so far; nothing ran.
        """
        generation = self.generation
        admission = self._admit(tenant, ingress)
        ingress.ledger.begin(generation, request_id, tenant.name)
        trace = None
        if ingress.traces is not None:
            trace = ingress.traces.begin(
                generation,
                request_id=request_id,
                route=route,
                model=self.timer.model,
                tenant=tenant.name,
                headers=headers,
            )
        try:
            yield
        except ShoalError as error:
            generation.failure = str(error)
            raise
        except Exception:
            generation.failure = "internal error"
            raise
        finally:
            generation.close()
            self.timer.end(generation)
            admission.end(generation.num_output_tokens)
            ingress.ledger.end(generation)
            log_request(request_id, tenant.name, generation, self.timer)
            if trace is not None:
                trace.end()

    def _admit(self, tenant: Tenant, ingress: Ingress) -> Admission:
        generation = self.generation
        try:
            names = ingress.model(self.timer.model).config.served_names
            admission = ingress.gate.admit(tenant, names, generation.num_prompt_tokens)
        except ShoalError:
            self.timer.end(generation)
            raise
        generation.belong_to(tenant.name, tenant.cache_salt, tenant.priority)
        return admission

    async def _whole(self, send: Send) -> None:
        generation, encoder = self.generation, self._encoder
        try:
            await generation.start()
            while not generation.is_finished:
                deltas = await generation.next()
                self.timer.on_tokens()
                encoder.collect(deltas)
            whole = encoder.whole(generation)
            if self._is_explained:
                whole["shoal"] = explanation(generation, self._http_id)
            body = orjson.dumps(whole)
        finally:
            generation.close()
            self.timer.end(generation)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, writer: EventWriter) -> None:
        generation, encoder = self.generation, self._encoder
        try:
            await generation.start()
            deltas = await generation.next()
            self.timer.on_tokens()
            await writer.begin()
            events = encoder.begin()
            chunk = encoder.chunk
            while True:
                events += chunk(deltas[0]) if len(deltas) == 1 else b"".join(map(chunk, deltas))
                if deltas[-1].finish_reason is not None and generation.is_finished:
                    break
                if events:
                    await writer.write(events)
                events = b""
                deltas = await generation.next()
                self.timer.on_tokens()
            generation.close()
            events += encoder.finish(generation)
            if self._is_explained:
                events += sse.event(
                    {
                        "object": "shoal.explanation",
                        "id": generation.request_id,
                        "choices": [],
                        "shoal": explanation(generation, self._http_id),
                    }
                )
            await writer.end(events + self._end_of_stream)
        except ShoalError as error:
            if not writer.has_begun:
                raise
            generation.failure = str(error)
            log.warning("%s: failed after its stream began: %s", generation.request_id, error)
            await writer.end(self._error_event(error_object(error)[1]))
        except Exception:
            if not writer.has_begun:
                raise
            generation.failure = "internal error"
            log.exception("%s: failed after its stream began", generation.request_id)
            await writer.end(self._error_event(internal_error_object()))
        finally:
            generation.close()
            self.timer.end(generation)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; cancel it as soon as the client is gone. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
