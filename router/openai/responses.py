"""``POST /v1/responses``: create and stream, over the same generation as a chat; nothing is stored.

A stream is a row of typed events with numbers; it ends with ``response.completed`` or ``response.incomplete``
and has no ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from router.generation import Delta, Generation, TextParams
from router.ingress import Ingress, ServedModel
from router.journal import Prompt
from router.openai.answer import GenerationResponse
from router.openai.logprobs import chat_logprobs
from router.openai.metrics import Metrics
from router.openai.responses_schema import ResponsesBody
from router.openai.sampling import check_num_logprobs, resolve_max_tokens
from router.text.detokenizer import TokenTable
from workers.engine.errors import PromptTooLong, UserError
from workers.engine.request import ChoiceParams, FinishReason

_LOGPROBS = "message.output_text.logprobs"


async def answer_response(
    ingress: Ingress, metrics: Metrics, body: ResponsesBody, request_id: str, created: int
) -> GenerationResponse:
    """Check a body against its model, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    model = ingress.model(body.model)
    check_num_logprobs(body.top_logprobs or 0, "top_logprobs", ingress.limits)
    prompt = await _prompt(model, body)
    params = ChoiceParams(
        max_tokens=resolve_max_tokens(
            body.max_output_tokens, "max_output_tokens", len(prompt), model.max_model_len
        ),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=ingress.draw_seed(),
        num_logprobs=(body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None,
    )
    generation = ingress.generation(model, f"resp_{request_id}", [prompt], [params], TextParams())
    encoder = ResponsesEncoder(request_id, created, body, params, model.tokenizer.table)
    return GenerationResponse(
        generation,
        encoder,
        metrics.timer(model.name),
        is_stream=bool(body.stream),
        end_of_stream=b"",
        error_event=encoder.error,
    )


class ResponsesEncoder:
    """Says a generation of one choice as the responses API does."""

    def __init__(
        self, request_id: str, created: int, body: ResponsesBody, params: ChoiceParams, table: TokenTable
    ) -> None:
        self._params = params
        self._table = table
        self._item_id = f"msg_{request_id}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_events = 0
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created}
        self._settings = _settings(body, params)

    def begin(self) -> bytes:
        """The response, its one message and that message's text, all still empty."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._event("response.created", response=self._response("in_progress", []))
            + self._event("response.in_progress", response=self._response("in_progress", []))
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._event("response.content_part.added", **self._place, part=part)
        )

    def chunk(self, delta: Delta) -> bytes:
        """Text as it comes."""
        self._texts.append(delta.text)
        entries = self._entries(delta)
        if not delta.text and not entries:
            return b""
        return self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=entries)

    def finish(self, generation: Generation) -> bytes:
        """The whole text, part, message and response."""
        text, part = "".join(self._texts), self._part()
        whole = self.whole(generation)
        last = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=self._logprobs)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=whole["output"][0])
            + self._event(last, response=whole)
        )

    def error(self, body: Mapping[str, Any]) -> bytes:
        """An error after the stream began; nothing follows it."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Gather text and log-probabilities."""
        for delta in deltas:
            self._texts.append(delta.text)
            self._entries(delta)

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``response`` object."""
        is_cut = generation.choices[0].finish_reason == FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        return {
            **self._response(status, [self._item(status, [self._part()])]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_input + num_output,
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"

    def _entries(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of a delta's token, if any were asked for; they are kept."""
        num_top = self._params.num_logprobs
        if delta.logprobs is None or num_top is None:
            return []
        self._logprobs.append(chat_logprobs(delta, delta.logprobs, num_top, self._table))
        return self._logprobs[-1:]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _item(self, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": list(content),
        }

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


def _settings(body: ResponsesBody, params: ChoiceParams) -> dict[str, Any]:
    """What the answer says about how it was asked for."""
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "metadata": body.metadata or {},
        "user": body.user,
    }


async def _prompt(model: ServedModel, body: ResponsesBody) -> Prompt:
    """Tokenize the conversation, with its oldest messages dropped where that was allowed and is needed."""
    messages = body.messages
    while True:
        try:
            return await model.prompt_of_chat(messages)
        except PromptTooLong as error:
            oldest = next((i for i, one in enumerate(messages[:-1]) if one["role"] != "system"), None)
            if body.truncation != "auto" or oldest is None:
                raise PromptTooLong(error.message, "input") from None
            del messages[oldest]
        except UserError as error:
            raise type(error)(error.message, "input") from None
