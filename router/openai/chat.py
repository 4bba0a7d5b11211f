"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.generation import Delta, Generation
from router.ingress import Ingress
from router.openai import sse
from router.openai.answer import GenerationResponse
from router.openai.logprobs import chat_logprobs
from router.openai.metrics import Metrics
from router.openai.sampling import (
    check_num_logprobs,
    check_sampling,
    choice_params,
    resolve_max_tokens,
    text_params,
)
from router.openai.schema import ChatBody, ChatMessage
from router.openai.structured import wanted_grammar
from router.openai.usage import usage_object
from router.text.detokenizer import TokenTable
from workers.engine.errors import InvalidRequest


async def answer_chat(
    ingress: Ingress, metrics: Metrics, body: ChatBody, request_id: str, created: int
) -> GenerationResponse:
    """Check a body against its model, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    model = ingress.model(body.model)
    table = model.tokenizer.table
    check_sampling(body, 1, len(table), ingress.limits)
    num_logprobs = _num_logprobs(body)
    check_num_logprobs(num_logprobs or 0, "top_logprobs", ingress.limits)
    grammar = wanted_grammar(body)
    await model.check_grammar(grammar)
    prompt = await model.prompt_of_chat([template_message(message) for message in body.messages])
    asked, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = resolve_max_tokens(asked, param, len(prompt), model.max_model_len)
    params = choice_params(body, max_tokens, num_logprobs, ingress.draw_seed(), len(table), grammar)
    completion_id = f"chatcmpl-{request_id}"
    generation = ingress.generation(model, completion_id, [prompt], params, text_params(body))
    encoder = ChatEncoder(
        completion_id,
        created,
        body.model,
        len(params),
        num_logprobs,
        table,
        with_usage=body.wants_usage_chunk,
    )
    return GenerationResponse(generation, encoder, metrics.timer(model.name), is_stream=bool(body.stream))


class ChatEncoder:
    """Says a generation as chat completions do."""

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        num_choices: int,
        num_logprobs: int | None,
        table: TokenTable,
        *,
        with_usage: bool,
    ) -> None:
        self._envelope = {"id": completion_id, "created": created, "model": model}
        self._num_choices = num_choices
        self._num_logprobs = num_logprobs
        self._table = table
        self._with_usage = with_usage
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
        self._frame = sse.ChunkFrame(
            self._chunk_envelope,
            num_choices,
            opening=b'"delta":{"content":',
            closing=b"}",
            with_usage=with_usage,
        )

    def begin(self) -> bytes:
        """The role of each choice."""
        fields = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._frame.other(index, fields) for index in range(self._num_choices))

    def chunk(self, delta: Delta) -> bytes:
        """Text as it comes; the finish reason in a chunk of its own."""
        index = delta.choice.index
        if delta.logprobs is not None and self._num_logprobs is not None:
            return self._frame.text_with_logprobs(
                index, delta.text, {"content": [self._entry(delta)], "refusal": None}
            )
        events = self._frame.text(index, delta.text) if delta.text else b""
        if delta.finish_reason is not None:
            fields: dict[str, Any] = {
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.choice.stop_reason,
            }
            events += self._frame.other(index, fields)
        return events

    def finish(self, generation: Generation) -> bytes:
        """Token counts, where asked for."""
        if not self._with_usage:
            return b""
        return sse.event({**self._chunk_envelope, "choices": [], "usage": usage_object(generation)})

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Gather text and log-probabilities by choice."""
        for delta in deltas:
            self._texts[delta.choice.index].append(delta.text)
            if delta.logprobs is not None and self._num_logprobs is not None:
                self._logprobs[delta.choice.index].append(self._entry(delta))

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        choices = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": "".join(self._texts[choice.index]),
                    "refusal": None,
                },
                "logprobs": None
                if self._num_logprobs is None
                else {"content": self._logprobs[choice.index], "refusal": None},
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in generation.choices
        ]
        return {
            **self._envelope,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_object(generation),
        }

    @property
    def _chunk_envelope(self) -> dict[str, Any]:
        return {**self._envelope, "object": "chat.completion.chunk"}

    def _entry(self, delta: Delta) -> dict[str, Any]:
        assert delta.logprobs is not None
        assert self._num_logprobs is not None
        return chat_logprobs(delta, delta.logprobs, self._num_logprobs, self._table)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def template_message(message: ChatMessage) -> dict[str, object]:
    """A message as the model's template knows it: content as one string, "developer" as "system"."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, object] = {"role": role, "content": message.text}
    if message.name is not None:
        found["name"] = message.name
    return found
