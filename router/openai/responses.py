"""``POST /v1/responses``: create, stream and count, over the same generation as a chat; nothing is stored.

A stream is a row of typed events with numbers; it ends with ``response.completed`` or ``response.incomplete``
and has no ``[DONE]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from router.generation import Delta, Generation
from router.ingress import Ingress
from router.openai.answer import GenerationResponse
from router.openai.body import in_turn
from router.openai.chat_request import PreparedChat, prepare_chat
from router.openai.logprobs import chat_logprobs
from router.openai.metrics import Metrics
from router.openai.response_items import Event, ResponseItems
from router.openai.responses_request import FieldNames, told_as_chat
from router.openai.responses_schema import ResponsesBody
from router.openai.sampling import check_num_logprobs
from router.openai.schema import ChatBody
from router.tenancy.keys import Tenant
from router.text.conversation import num_bytes
from workers.engine.errors import PromptTooLong, UserError
from workers.engine.request import FinishReason

_MESSAGE = re.compile(r"^messages\[(\d+)\]")


async def answer_response(
    ingress: Ingress, metrics: Metrics, body: ResponsesBody, request_id: str, created: int
) -> GenerationResponse:
    """Check a body against its model, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    chat = await _prepare(ingress, body, request_id)
    chat.generation.grammar_param = FieldNames({}).param(chat.generation.grammar_param)
    encoder = ResponsesEncoder(request_id, created, body, chat)
    return GenerationResponse(
        chat.generation,
        encoder,
        metrics.timer(chat.model.name),
        is_stream=bool(body.stream),
        end_of_stream=b"",
        error_event=encoder.error,
    )


async def count_input_tokens(
    ingress: Ingress, tenant: Tenant, body: ResponsesBody, request_id: str
) -> dict[str, Any]:
    """How many tokens the prompt of such a response has; nothing is generated.

    Raises:
        UserError: the body asks for what this model cannot give.
        Forbidden, RateLimited: the key does not reach so far.
    """
    with ingress.gate.visit(tenant, ingress.model(body.model).config.served_names):
        chat = await _prepare(ingress, body, request_id)
    return {"object": "response.input_tokens", "input_tokens": chat.generation.num_prompt_tokens}


class ResponsesEncoder:
    """Says a generation of one choice as the responses API does."""

    def __init__(self, request_id: str, created: int, body: ResponsesBody, chat: PreparedChat) -> None:
        self._chat = chat
        self._items = ResponseItems(request_id)
        self._num_events = 0
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created}
        self._settings = _settings(body, chat)

    def begin(self) -> bytes:
        """The response, still empty."""
        empty = self._response("in_progress", [])
        return self._events([("created", {"response": empty}), ("in_progress", {"response": empty})])

    def chunk(self, delta: Delta) -> bytes:
        """What a delta adds to the items."""
        return self._events(self._feed(delta))

    def finish(self, generation: Generation) -> bytes:
        """The end of the last item, and the whole response."""
        events = self._items.end(_status(generation))
        whole = self.whole(generation)
        return self._events([*events, (whole["status"], {"response": whole})])

    def error(self, body: Mapping[str, Any]) -> bytes:
        """An error after the stream began; nothing follows it."""
        error = body["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._event("error", fields)

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Gather the items."""
        for delta in deltas:
            self._feed(delta)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``response`` object."""
        status = _status(generation)
        self._items.end(status)
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        return {
            **self._response(status, self._items.items),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_input + num_output,
            },
        }

    def _feed(self, delta: Delta) -> list[Event]:
        parts: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        if self._chat.messages is not None:
            is_last = delta.finish_reason is not None
            parts = self._chat.messages[delta.choice.index].feed(delta.text, is_last=is_last)
        num_top = self._chat.num_logprobs
        logprobs = []
        if delta.logprobs is not None and num_top is not None:
            logprobs = [chat_logprobs(delta, delta.logprobs, num_top, self._chat.model.tokenizer.table)]
            parts = parts or [{}]
        events: list[Event] = []
        for part in parts:
            # Only words have log-probabilities in this API.
            is_text = "reasoning_content" not in part and "tool_calls" not in part
            events += self._items.feed(part, logprobs if is_text else ())
            logprobs = []
        return events

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event(f"response.{kind}", fields) for kind, fields in events)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            **self._settings,
            "usage": None,
        }


def _status(generation: Generation) -> str:
    is_cut = generation.choices[0].finish_reason == FinishReason.LENGTH
    return "incomplete" if is_cut else "completed"


def _settings(body: ResponsesBody, chat: PreparedChat) -> dict[str, Any]:
    """What the answer says about how it was asked for."""
    params = chat.generation.choices[0].journal.params
    form = body.text.format if body.text is not None else None
    choice = body.tool_choice
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tools": [
            {"strict": False, "parameters": None, **tool.model_dump(exclude_none=True)}
            for tool in body.tools or ()
        ],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "metadata": body.metadata or {},
        "user": body.user,
    }


async def _prepare(ingress: Ingress, body: ResponsesBody, request_id: str) -> PreparedChat:
    """The chat that says the same; what is wrong with it is told in this API's words."""
    check_num_logprobs(body.top_logprobs or 0, "top_logprobs", ingress.limits)
    chat, names = await in_turn(num_bytes(body.input), partial(told_as_chat, body))
    try:
        return await _prepare_shortened(ingress, chat, body.truncation == "auto", request_id)
    except UserError as error:
        raise names.ours(error) from None


def _at_its_place(error: UserError, kept: Sequence[int]) -> UserError:
    """An error of the messages ``kept``, with the place that its message had among all."""

    def place(found: re.Match[str]) -> str:
        return f"messages[{kept[int(found[1])]}]"

    message, param = (_MESSAGE.sub(place, text, count=1) for text in (error.message, error.param or ""))
    return type(error)(message, param or None)


async def _prepare_shortened(
    ingress: Ingress, body: ChatBody, may_drop: bool, request_id: str
) -> PreparedChat:
    """Prepare the chat, with its oldest messages dropped where that is allowed and needed.

    How many must go is found by halving: of ten thousand each try costs as much as a prompt.
    """
    droppable = [i for i, one in enumerate(body.messages[:-1]) if one.role not in ("system", "developer")]

    async def without(num_dropped: int) -> PreparedChat:
        dropped = set(droppable[:num_dropped])
        kept = [i for i in range(len(body.messages)) if i not in dropped]
        shortened = body.model_copy(update={"messages": [body.messages[i] for i in kept]})
        try:
            return await prepare_chat(ingress, shortened, f"resp_{request_id}", request_id)
        except UserError as error:
            raise _at_its_place(error, kept) from None

    try:
        return await without(0)
    except PromptTooLong:
        if not may_drop or not droppable:
            raise
    found = await without(len(droppable))
    too_few, enough = 0, len(droppable)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        try:
            found, enough = await without(middle), middle
        except PromptTooLong:
            too_few = middle
    return found
