"""``shoal.inference.v1.Inference``: a request becomes the body that the HTTP API would read, so that both agree."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from pydantic import BaseModel, ValidationError

from router.generation import Delta, Generation
from router.ingress import Ingress
from router.openai.answer import GenerationResponse
from router.openai.chat import answer_chat
from router.openai.completions import answer_completion
from router.openai.errors import error_object, invalid_body
from router.openai.metrics import Metrics
from router.openai.schema import ChatBody, CompletionBody
from router.rpc.proto import inference_pb2 as pb
from router.rpc.proto import inference_pb2_grpc
from router.telemetry.request_log import log_request
from router.tenancy.key_source import KeySource
from router.tenancy.keys import ANYBODY, Tenant
from workers.engine.errors import InvalidRequest, ShoalError

log = logging.getLogger(__name__)

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_Model = TypeVar("_Model", bound=BaseModel)
_COPIED = (
    *("max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed"),
)
"""Optional fields that have the same name and meaning in the HTTP API."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generations for users of gRPC."""

    def __init__(self, ingress: Ingress, metrics: Metrics, keys: KeySource) -> None:
        self._ingress = ingress
        self._metrics = metrics
        self._keys = keys

    async def Generate(  # the service's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream one generation."""
        tenant = await self._let_in(context)
        try:
            response = await self._prepare(request)
            admission = response.admit(tenant, self._ingress)
        except ShoalError as error:
            await _abort(context, error)
        generation, timer = response.generation, response.timer
        trace = None
        if self._ingress.traces is not None:
            trace = self._ingress.traces.begin(
                generation,
                request_id=generation.request_id,
                route="gRPC Generate",
                model=timer.model,
                tenant=tenant.name,
                headers=[
                    (str(name).encode(), str(value).encode())
                    for name, value in context.invocation_metadata() or ()
                ],
            )
        try:
            await generation.start()
            while not generation.is_finished:
                deltas = await generation.next()
                timer.on_tokens()
                for delta in deltas:
                    if delta.text or delta.token_id is not None or delta.finish_reason is not None:
                        yield _message(delta)
            yield pb.GenerateResponse(usage=_usage(generation))
        except ShoalError as error:
            await _abort(context, error)
        finally:  # also where the caller has gone: gRPC cancels this coroutine
            generation.close()
            timer.end(generation)
            admission.end(generation.num_output_tokens)
            log_request(generation.request_id, tenant.name, generation, timer)
            if trace is not None:
                trace.end()

    async def _prepare(self, request: pb.GenerateRequest) -> GenerationResponse:
        """Check and tokenize.

        Raises:
            UserError: as the HTTP API would say it.
        """
        kind = request.WhichOneof("input")
        fields: dict[str, Any] = {"model": request.model, "ignore_eos": request.ignore_eos}
        fields |= {name: getattr(request, name) for name in _COPIED if request.HasField(name)}
        if request.stop:
            fields["stop"] = list(request.stop)
        if request.stop_token_ids:
            fields["stop_token_ids"] = list(request.stop_token_ids)
        if request.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
        wants_logprobs = request.HasField("logprobs")
        request_id, created = uuid.uuid4().hex, int(time.time())
        if kind == "conversation":
            fields["messages"] = [
                {"role": message.role, "content": message.content}
                for message in request.conversation.messages
            ]
            if wants_logprobs:
                fields |= {"logprobs": True, "top_logprobs": request.logprobs}
            body = _validated(ChatBody, fields)
            return await answer_chat(self._ingress, self._metrics, body, request_id, created)
        if kind is None:
            raise InvalidRequest("give a prompt, prompt_token_ids or a conversation", "input")
        fields["prompt"] = request.prompt if kind == "prompt" else list(request.prompt_token_ids.ids)
        if wants_logprobs:
            fields["logprobs"] = request.logprobs
        completion = _validated(CompletionBody, fields)
        return await answer_completion(self._ingress, self._metrics, completion, request_id, created)

    async def _let_in(self, context: grpc.aio.ServicerContext) -> Tenant:
        """Who calls; ends the call if a key is needed and not shown."""
        ring = self._keys.ring()
        if ring is None:
            return ANYBODY
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        kind, _, key = str(given).partition(" ")
        tenant = ring.find(key.strip()) if kind.lower() == "bearer" else None
        if tenant is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no valid API key in the metadata 'authorization: Bearer KEY'",
            )
        assert tenant is not None, "abort always raises"
        return tenant


def _validated(model: type[_Model], fields: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from None


async def _abort(context: grpc.aio.ServicerContext, error: ShoalError) -> NoReturn:
    """End the call as the HTTP API's table of errors says."""
    status, body = error_object(error)
    told = body["error"]
    trailing = [(f"shoal-{name}", told[name]) for name in ("param", "code") if told[name]]
    await context.abort(_STATUS.get(status, grpc.StatusCode.INTERNAL), told["message"], tuple(trailing))
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
