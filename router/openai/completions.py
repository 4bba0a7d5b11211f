"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from router.generation import Choice, Delta, Generation
from router.ingress import Ingress
from router.journal import Prompt, PromptTerms
from router.openai import sse
from router.openai.answer import GenerationResponse
from router.openai.beams import width_param
from router.openai.contest import Contest
from router.openai.logprobs import CompletionLogprobs, echoed_entries, join_entries, scored_prompt
from router.openai.metrics import Metrics
from router.openai.sampling import (
    check_num_logprobs,
    check_sampling,
    check_token_ids,
    choice_params,
    contest_of,
    name_of_input,
    prompt_terms,
    resolve_max_tokens,
    text_params,
)
from router.openai.schema import CompletionBody
from router.openai.structured import wanted_grammar
from router.openai.usage import usage_object
from router.served_model import ServedModel
from router.text.detokenizer import TokenTable
from workers.engine.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


async def answer_completion(
    ingress: Ingress, metrics: Metrics, body: CompletionBody, request_id: str, created: int
) -> GenerationResponse:
    """Check a body against its model, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    model = ingress.model(body.model)
    table = model.tokenizer.table
    given = body.prompts
    check_sampling(body, len(given), len(table), ingress.limits)
    check_num_logprobs(body.logprobs or 0, "logprobs", ingress.limits)
    _check_completion(body)
    grammar = wanted_grammar(body)
    await model.check_grammar(grammar)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    terms = prompt_terms(body, model.max_model_len, asked)
    prompts = [
        await _prompt(model, prompt, name_of_input(body.prompt, place, "prompt"), body, terms)
        for place, prompt in enumerate(given)
    ]
    max_tokens = resolve_max_tokens(
        body.max_tokens, "max_tokens", max(map(len, prompts)), model.max_model_len, DEFAULT_MAX_TOKENS
    )
    given_prompt_logprobs, text = body.prompt_logprobs, text_params(body)
    if body.echo and body.logprobs is not None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    if max_tokens == 0 and body.prompt_logprobs is not None:
        # The engine gives a token at least; what it says of the prompt is all that is wanted.
        max_tokens, text = 1, replace(text, is_silent=True)
    params = choice_params(body, max_tokens, body.logprobs, ingress.draw_seed(), model.tokenizer, grammar)
    completion_id = f"cmpl-{request_id}"
    generation = ingress.generation(model, completion_id, prompts, params, text)
    generation.width_param = width_param(body)
    if grammar is not None:
        generation.grammar_param = grammar.param
    if max_tokens == 0:
        generation.end_at_once()
    encoder = CompletionEncoder(
        completion_id,
        created,
        body.model,
        _echoes(model, prompts, given, bool(body.echo), len(params)),
        body.logprobs,
        table,
        with_usage=body.wants_usage_chunk,
        contest=contest_of(body),
        num_prompt_logprobs=given_prompt_logprobs,
    )
    return GenerationResponse(generation, encoder, metrics.timer(model.name), is_stream=bool(body.stream))


class CompletionEncoder:
    """Says a generation as completions do. ``echoes`` is the text that stands before each choice's own."""

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        echoes: Sequence[str],
        num_logprobs: int | None,
        table: TokenTable,
        *,
        with_usage: bool,
        contest: Contest | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._envelope = {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._echoes = echoes
        self._with_usage = with_usage
        self._contest = contest
        self._num_prompt_logprobs = num_prompt_logprobs
        self._num_logprobs = num_logprobs
        self._table = table
        self._is_echoed = [False] * len(echoes)
        self._texts: list[list[str]] = [[echo] for echo in echoes]
        self._logprobs = (
            [CompletionLogprobs(num_logprobs, table, len(echo)) for echo in echoes]
            if num_logprobs is not None
            else None
        )
        self._entries: list[list[dict[str, list[Any]]]] = [[] for _ in echoes]
        self._frame = sse.ChunkFrame(
            self._envelope, len(echoes), opening=b'"text":', closing=b"", with_usage=with_usage
        )

    def begin(self) -> bytes:
        """The prompts, where they are echoed without log-probabilities: those come with the first token."""
        if self._logprobs is not None:
            return b""
        return b"".join(self._frame.text(i, echo) for i, echo in enumerate(self._echoes) if echo)

    def chunk(self, delta: Delta) -> bytes:
        """Text as it comes; the finish reason in a chunk of its own."""
        index = delta.choice.index
        if self._logprobs is not None and self._echoes[index] and not self._is_echoed[index]:
            self._is_echoed[index] = True
            return self._frame.text_with_logprobs(
                index, self._echoes[index], self._echoed(delta.choice)
            ) + self.chunk(delta)
        if delta.logprobs is not None and self._logprobs is not None:
            return self._frame.text_with_logprobs(
                index, delta.text, self._logprobs[index].entry(delta, delta.logprobs)
            )
        events = self._frame.text(index, delta.text) if delta.text else b""
        if delta.finish_reason is not None:
            fields = {
                "text": "",
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
        return sse.event({**self._envelope, "choices": [], "usage": usage_object(generation)})

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Gather text and log-probabilities by choice."""
        for delta in deltas:
            index = delta.choice.index
            self._texts[index].append(delta.text)
            if self._contest is not None and delta.logprobs is not None:
                self._contest.note(index, delta.logprobs.sampled)
            if delta.logprobs is not None and self._logprobs is not None:
                self._entries[index].append(self._logprobs[index].entry(delta, delta.logprobs))

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A ``text_completion`` object."""
        given = generation.choices
        if self._contest is not None:
            given = [given[index] for index in self._contest.winners(len(given))]
        choices = [
            {
                "index": number,
                "text": "".join(self._texts[choice.index]),
                "logprobs": None if self._logprobs is None else self._joined(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._scored(choice),
            }
            for number, choice in enumerate(given)
        ]
        return {**self._envelope, "choices": choices, "usage": usage_object(generation)}

    def _echoed(self, choice: Choice) -> dict[str, list[Any]]:
        assert self._num_logprobs is not None, "asked for, else there is nothing to echo them with"
        prompt = choice.journal.prompt.token_ids
        return echoed_entries(prompt, choice.prompt_logprobs, self._num_logprobs, self._table)

    def _joined(self, choice: Choice) -> dict[str, list[Any]]:
        entries = self._entries[choice.index]
        return join_entries([self._echoed(choice), *entries] if self._echoes[choice.index] else entries)

    def _scored(self, choice: Choice) -> dict[str, Any]:
        if self._num_prompt_logprobs is None:
            return {}
        prompt = choice.journal.prompt.token_ids
        scores = choice.prompt_logprobs
        return {"prompt_logprobs": scored_prompt(prompt, scores, self._num_prompt_logprobs, self._table)}


def _check_completion(body: CompletionBody) -> None:
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens: must be at least 1 unless the prompt is echoed", "max_tokens")


async def _prompt(
    model: ServedModel, prompt: str | list[int], param: str, body: CompletionBody, terms: PromptTerms
) -> Prompt:
    if isinstance(prompt, list):
        found = model.prompt_of_ids(prompt, terms, param)  # first, since it refuses millions at once
        check_token_ids(prompt, model.tokenizer.vocab_size, param)
        return found
    found = await model.prompt_of_text(
        prompt, terms, param, add_special_tokens=body.add_special_tokens is not False
    )
    if not len(found):
        raise InvalidRequest(f"{param}: is empty, it needs at least one token", param)
    return found


def _echoes(
    model: ServedModel, prompts: Sequence[Prompt], given: Sequence[str | list[int]], echo: bool, n: int
) -> list[str]:
    """What each choice's text begins with: its prompt, or nothing."""
    if not echo:
        return [""] * (len(prompts) * n)
    texts = [
        text if isinstance(text, str) else model.tokenizer.decode(prompt.token_ids)
        for text, prompt in zip(given, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(n)]
