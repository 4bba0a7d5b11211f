"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from router.generation import Choice, Delta, Generation
from router.ingress import Ingress
from router.openai import sse
from router.openai.answer import GenerationResponse
from router.openai.chat_message import GrowingMessage
from router.openai.chat_request import prepare_chat
from router.openai.contest import Contest
from router.openai.logprobs import chat_logprobs, scored_prompt
from router.openai.metrics import Metrics
from router.openai.sampling import contest_of
from router.openai.schema import ChatBody
from router.openai.usage import usage_object
from router.text.detokenizer import TokenTable


async def answer_chat(
    ingress: Ingress, metrics: Metrics, body: ChatBody, request_id: str, created: int
) -> GenerationResponse:
    """Check a body against its model, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    completion_id = f"chatcmpl-{request_id}"
    chat = await prepare_chat(ingress, body, completion_id, request_id)
    encoder = ChatEncoder(
        completion_id,
        created,
        body.model,
        len(chat.generation.choices),
        chat.num_logprobs,
        chat.model.tokenizer.table,
        with_usage=body.wants_usage_chunk,
        messages=chat.messages,
        is_named=chat.is_named,
        shows_reasoning=body.include_reasoning is not False,
        contest=contest_of(body),
    )
    return GenerationResponse(
        chat.generation, encoder, metrics.timer(chat.model.name), is_stream=bool(body.stream)
    )


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
        messages: Sequence[GrowingMessage] | None = None,
        is_named: bool = False,
        shows_reasoning: bool = True,
        contest: Contest | None = None,
    ) -> None:
        """``messages`` is given where calls or thinking must be told apart; then text goes through them."""
        self._envelope = {"id": completion_id, "created": created, "model": model}
        self._num_choices = num_choices
        self._num_logprobs = num_logprobs
        self._table = table
        self._with_usage = with_usage
        self._messages = messages
        self._is_named = is_named
        self._shows_reasoning = shows_reasoning
        self._contest = contest
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
        if self._messages is not None:
            return self._parsed(delta, self._messages[index])
        if delta.logprobs is not None and self._num_logprobs is not None:
            return self._frame.text_with_logprobs(
                index, delta.text, {"content": [self._entry(delta)], "refusal": None}
            )
        events = self._frame.text(index, delta.text) if delta.text else b""
        if delta.finish_reason is not None:
            events += self._ending(delta, delta.finish_reason)
        return events

    def _parsed(self, delta: Delta, message: GrowingMessage) -> bytes:
        """A chunk for each part of the message that a delta makes."""
        index = delta.choice.index
        parts = message.feed(delta.text, is_last=delta.finish_reason is not None)
        if not self._shows_reasoning:
            parts = [part for part in parts if "reasoning_content" not in part]
        logprobs = None
        if delta.logprobs is not None and self._num_logprobs is not None:
            logprobs = {"content": [self._entry(delta)], "refusal": None}
            parts = parts or [{}]
        events = b""
        for part in parts:
            fields = {"delta": part, "logprobs": logprobs, "finish_reason": None}
            events += self._frame.other(index, fields)
            logprobs = None
        if delta.finish_reason is not None:
            events += self._ending(delta, self._finish_reason(delta.finish_reason, message))
        return events

    def _ending(self, delta: Delta, finish_reason: str) -> bytes:
        fields: dict[str, Any] = {
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": delta.choice.stop_reason,
        }
        return self._frame.other(delta.choice.index, fields)

    def _finish_reason(self, reason: str, message: GrowingMessage) -> str:
        """As OpenAI has it: a function that was named is no decision to call one."""
        return "tool_calls" if reason == "stop" and message.num_calls and not self._is_named else reason

    def finish(self, generation: Generation) -> bytes:
        """Token counts, where asked for."""
        if not self._with_usage:
            return b""
        return sse.event({**self._chunk_envelope, "choices": [], "usage": usage_object(generation)})

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Gather text and log-probabilities by choice."""
        for delta in deltas:
            if self._messages is not None:
                is_last = delta.finish_reason is not None
                self._messages[delta.choice.index].feed(delta.text, is_last=is_last)
            else:
                self._texts[delta.choice.index].append(delta.text)
            if delta.logprobs is not None and self._contest is not None:
                self._contest.note(delta.choice.index, delta.logprobs.sampled)
            if delta.logprobs is not None and self._num_logprobs is not None:
                self._logprobs[delta.choice.index].append(self._entry(delta))

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        given = generation.choices
        if self._contest is not None:
            given = [given[index] for index in self._contest.winners(len(given))]
        choices = [
            {
                "index": number,
                "message": self._message(choice.index),
                "logprobs": None
                if self._num_logprobs is None
                else {"content": self._logprobs[choice.index], "refusal": None},
                "finish_reason": self._finish_reason_of(choice),
                "stop_reason": choice.stop_reason,
            }
            for number, choice in enumerate(given)
        ]
        return {
            **self._envelope,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_object(generation),
            **self._scored(generation.choices[0]),
        }

    def _scored(self, choice: Choice) -> dict[str, Any]:
        """vLLM's ``prompt_logprobs``, where asked for."""
        num_top = choice.journal.params.num_prompt_logprobs
        if num_top is None:
            return {}
        prompt = choice.journal.prompt.token_ids
        return {"prompt_logprobs": scored_prompt(prompt, choice.prompt_logprobs, num_top, self._table)}

    def _message(self, index: int) -> dict[str, Any]:
        if self._messages is None:
            return {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
        message = self._messages[index].whole()
        if not self._shows_reasoning:
            message.pop("reasoning_content", None)
        return message

    def _finish_reason_of(self, choice: Choice) -> str | None:
        if self._messages is None or choice.finish_reason is None:
            return choice.finish_reason
        return self._finish_reason(choice.finish_reason, self._messages[choice.index])

    @property
    def _chunk_envelope(self) -> dict[str, Any]:
        return {**self._envelope, "object": "chat.completion.chunk"}

    def _entry(self, delta: Delta) -> dict[str, Any]:
        assert delta.logprobs is not None
        assert self._num_logprobs is not None
        return chat_logprobs(delta, delta.logprobs, self._num_logprobs, self._table)
