"""``shoal.inference.v1.Inference``: calls are answered by the code behind the HTTP API, with its limits and errors."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import NoReturn

import grpc
import grpc.aio

from router.edge import request_id_of
from router.generation import Delta, Generation
from router.ingress import Ingress
from router.openai.answer import GenerationResponse
from router.openai.body import in_turn
from router.openai.chat import answer_chat
from router.openai.completions import answer_completion
from router.openai.errors import error_object, retry_after
from router.openai.header_wishes import header_wishes
from router.openai.metrics import Metrics
from router.openai.schema import ChatBody, CompletionBody
from router.rpc.body import body_of, in_its_words, parse
from router.rpc.proto import inference_pb2 as pb
from router.rpc.proto import inference_pb2_grpc
from router.tenancy.key_source import KeySource
from router.tenancy.keys import ANYBODY, Tenant
from workers.engine.errors import ShoalError, UserError

log = logging.getLogger(__name__)

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
REQUEST_ID = "x-request-id"
MAX_MESSAGE_CHARS = 1000
"""Of an error: it goes into a header, of which clients take 8 KiB in all."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generations for users of gRPC."""

    def __init__(self, ingress: Ingress, metrics: Metrics, keys: KeySource) -> None:
        self._ingress = ingress
        self._metrics = metrics
        self._keys = keys

    async def Generate(  # the service's name
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one generation; ``request`` as it came: gRPC itself would call a wrong one an error of ours."""
        call = _Call(context)
        await context.send_initial_metadata(((REQUEST_ID, call.request_id),))
        tenant = await self._let_in(call)
        message: pb.GenerateRequest | None = None
        try:
            message = await in_turn(len(request), partial(parse, request))
            body = await in_turn(len(request), partial(body_of, message))
            response = await self._prepare(body)
            generation = response.generation
            if session := header_wishes(call.headers).session:
                generation.join_session(session)
            with response.attended(self._ingress, tenant, call.request_id, "gRPC Generate", call.headers):
                await generation.start()
                while not generation.is_finished:
                    deltas = await generation.next()
                    response.timer.on_tokens()
                    for delta in deltas:
                        if delta.text or delta.token_id is not None or delta.finish_reason is not None:
                            yield _message(delta)
                yield pb.GenerateResponse(usage=_usage(generation))
        except ShoalError as error:
            await call.refuse(error, message)
        except Exception:
            log.exception("%s: gRPC Generate failed", call.request_id)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    async def _prepare(self, body: ChatBody | CompletionBody) -> GenerationResponse:
        """Check and tokenize.

        Raises:
            UserError: as the HTTP API would say it.
        """
        generation_id, created = uuid.uuid4().hex, int(time.time())
        if isinstance(body, ChatBody):
            return await answer_chat(self._ingress, self._metrics, body, generation_id, created)
        return await answer_completion(self._ingress, self._metrics, body, generation_id, created)

    async def _let_in(self, call: _Call) -> Tenant:
        """Who calls; ends the call if a key is needed and not shown."""
        ring = self._keys.ring()
        if ring is None:
            return ANYBODY
        given = next(
            (value.decode("latin-1") for name, value in call.headers if name == b"authorization"), ""
        )
        kind, _, key = given.partition(" ")
        tenant = ring.find(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            await call.context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no valid API key in the metadata 'authorization: Bearer KEY'",
                (("shoal-code", "invalid_api_key"),),
            )
        assert tenant is not None, "abort always raises"
        return tenant


class _Call:
    """One call: its metadata as HTTP has headers, its id, and how it is refused."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.context = context
        self.headers = [
            (str(name).encode(), value if isinstance(value, bytes) else str(value).encode())
            for name, value in context.invocation_metadata() or ()
        ]
        self.request_id = request_id_of(self.headers)

    async def refuse(self, error: ShoalError, request: pb.GenerateRequest | None = None) -> NoReturn:
        """End the call as the HTTP API's table of errors says; of ``request`` come the names of fields."""
        status, body = error_object(error)
        told = body["error"]
        message, param = told["message"], told["param"]
        if isinstance(error, UserError) and request is not None:
            message, param = in_its_words(error, request)
        trailing = [("shoal-param", param)] if param else []
        if told["code"]:
            trailing.append(("shoal-code", told["code"]))
        retry_after_s = retry_after(error)
        if retry_after_s is not None:
            trailing.append(("retry-after", str(retry_after_s)))
        await self.context.abort(
            _STATUS.get(status, grpc.StatusCode.INTERNAL), message[:MAX_MESSAGE_CHARS], tuple(trailing)
        )
        raise AssertionError("abort always raises")


def _message(delta: Delta) -> pb.GenerateResponse:
    message = pb.GenerateResponse(index=delta.choice.index, text=delta.text)
    if delta.token_id is not None:
        message.token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            found = delta.logprobs
            top = dict(zip(found.top_token_ids, found.top_logprobs, strict=True))
            message.logprobs.add(token_id=delta.token_id, logprob=found.sampled, top=top)
    if delta.finish_reason is not None:
        message.finish_reason = delta.finish_reason
        reason = delta.choice.stop_reason
        message.stop_reason = "" if reason is None else str(reason)
    return message


def _usage(generation: Generation) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_output_tokens,
        cached_tokens=generation.num_cached_tokens,
    )
