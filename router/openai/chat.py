"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from router.generation import Choice, Delta, Generation
from router.ingress import Ingress, ServedModel
from router.journal import Prompt
from router.openai import sse
from router.openai.answer import GenerationResponse
from router.openai.chat_message import GrowingMessage
from router.openai.logprobs import chat_logprobs
from router.openai.messages import template_messages
from router.openai.metrics import Metrics
from router.openai.sampling import (
    check_num_logprobs,
    check_sampling,
    choice_params,
    resolve_max_tokens,
    text_params,
)
from router.openai.schema import ChatBody
from router.openai.structured import wanted_grammar
from router.openai.tools import ToolUse, tool_use
from router.openai.usage import usage_object
from router.text.chat_template import TemplateOptions
from router.text.detokenizer import TokenTable
from router.text.message import MessageParser
from router.text.reasoning import ReasoningParser, ReasoningSyntax
from router.text.tools.call_parser import CallParser
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams


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
    answer = wanted_grammar(body)
    use = tool_use(
        body, model.tool_format, model.tokenizer, answer, allows_auto=model.config.enable_auto_tool_choice
    )
    grammar = answer if use is None or use.grammar is None else use.grammar
    await model.check_grammar(grammar)
    messages = template_messages(body.messages, model.tokenizer.chat_template)
    prompt = await model.prompt_of_chat(messages, _template_options(body, use))
    asked, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    max_tokens = resolve_max_tokens(asked, param, len(prompt), model.max_model_len)
    params = choice_params(body, max_tokens, num_logprobs, ingress.draw_seed(), len(table), grammar)
    thinking = _Thinking.of(model, prompt)
    params = [thinking.limit(one, body.thinking_token_budget) for one in params]
    completion_id = f"chatcmpl-{request_id}"
    text = text_params(body)
    if use is not None and use.format.shows_special_tokens:
        text = replace(text, skip_special_tokens=False)
    generation = ingress.generation(model, completion_id, [prompt], params, text)
    encoder = ChatEncoder(
        completion_id,
        created,
        body.model,
        len(params),
        num_logprobs,
        table,
        with_usage=body.wants_usage_chunk,
        messages=_messages(request_id, len(params), use, thinking),
        is_named=use is not None and use.is_named,
        shows_reasoning=body.include_reasoning is not False,
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
        messages: Sequence[GrowingMessage] | None = None,
        is_named: bool = False,
        shows_reasoning: bool = True,
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
            if delta.logprobs is not None and self._num_logprobs is not None:
                self._logprobs[delta.choice.index].append(self._entry(delta))

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice.index),
                "logprobs": None
                if self._num_logprobs is None
                else {"content": self._logprobs[choice.index], "refusal": None},
                "finish_reason": self._finish_reason_of(choice),
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


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _template_options(body: ChatBody, use: ToolUse | None) -> TemplateOptions:
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: not together with add_generation_prompt", "continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return TemplateOptions(
        add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
        continue_final_message=goes_on,
        tools=[tool.spelled() for tool in use.tools] if use is not None else (),
        kwargs=kwargs,
    )


@dataclass(frozen=True, slots=True)
class _Thinking:
    """How a model's thinking is told apart, and whether the prompt has begun or ended it."""

    syntax: ReasoningSyntax | None
    is_open: bool | None
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: ServedModel, prompt: Prompt) -> _Thinking:
        """As the model is configured and the prompt has it."""
        syntax, tokenizer = model.reasoning, model.tokenizer
        if syntax is None:
            return cls(None, None, ())
        if tokenizer.ends_with(prompt.token_ids, syntax.end):
            return cls(syntax, False, ())
        is_open = True if tokenizer.ends_with(prompt.token_ids, syntax.begin) else None
        return cls(syntax, is_open, tuple(tokenizer.encode(syntax.end, add_special_tokens=False)))

    def limit(self, params: ChoiceParams, budget: int | None) -> ChoiceParams:
        """Let a grammar wait for the answer, and thinking end within its budget."""
        if budget is not None and self.syntax is None:
            raise InvalidRequest(
                "thinking_token_budget: this model's thinking is not told apart (--reasoning-parser)",
                "thinking_token_budget",
            )
        if not self.end_ids or (budget is None and not params.grammar):
            return params
        return replace(params, thinking_end=self.end_ids, thinking_budget=budget)


def _messages(
    request_id: str, num_choices: int, use: ToolUse | None, thinking: _Thinking
) -> list[GrowingMessage] | None:
    """A parser for each choice; None where text is text."""
    if use is None and thinking.syntax is None:
        return None
    messages = []
    for index in range(num_choices):
        reasoning = (
            ReasoningParser(thinking.syntax, is_thinking=thinking.is_open) if thinking.syntax else None
        )
        calls = CallParser(use.format.syntax, use.names) if use is not None else None
        length = use.format.id_chars if use is not None else 0
        new_id = partial(_call_id, f"{request_id}-{index}", length)
        messages.append(GrowingMessage(MessageParser(reasoning, calls), new_id))
    return messages


def _call_id(request_id: str, length: int, number: int) -> str:
    """Mistral's templates want exactly nine characters."""
    digest = blake2b(f"{request_id}-{number}".encode(), digest_size=16).hexdigest()
    return digest[:length] if length == 9 else f"call_{digest[:length]}"
