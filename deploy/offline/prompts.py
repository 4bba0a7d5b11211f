"""The forms in which offline callers give prompts and sampling parameters, and the tokenizer for their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import Any

from pydantic import Field, ValidationError

from deploy.offline.sampling_params import SamplingParams
from deploy.preflight import text_files
from deploy.served_model import template_of
from deploy.settings import ServeSettings
from router.openai.errors import invalid_body
from router.openai.messages import template_messages
from router.openai.schema import Body, ChatMessage
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from workers.checkpoint.source import ModelFiles
from workers.checkpoint.vocabulary import load_vocabulary
from workers.engine.errors import InvalidRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; with both, the text is what the ids were made
of, as in vLLM: it is reported, not read."""
_KEYS = ("prompt", "prompt_token_ids")
_FORMS = "give text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids', or a list of these"


def load_tokenizer(settings: ServeSettings, files: ModelFiles) -> Tokenizer:
    """The tokenizer that the settings name, with their chat template."""
    vocabulary = load_vocabulary(text_files(settings, files))
    template = template_of(settings)
    return Tokenizer(vocabulary if template is None else replace(vocabulary, chat_template=template))


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several (a generator, say), as a list.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts are {_named(prompts)}; {_FORMS}", "prompts")
    listed = list(prompts)
    if listed and isinstance(listed[0], Integral):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def encoded(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """A prompt's text, where there is one, and its token ids.

    Raises:
        InvalidRequest: it has none of the forms of ``Prompt``, or is text and there is no tokenizer.
    """
    given: object = prompt
    text = None
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt and "prompt" not in prompt:
            raise InvalidRequest("a prompt given as a dict needs 'prompt' or 'prompt_token_ids'", "prompt")
        if unknown := [key for key in prompt if key not in _KEYS]:
            raise InvalidRequest(
                f"a prompt given as a dict has {unknown[0]!r}, it may have 'prompt' and 'prompt_token_ids'",
                "prompt",
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise InvalidRequest(f"a prompt's text is {_named(text)}, it must be text", "prompt")
        given = prompt.get("prompt_token_ids", text)
    if isinstance(given, str):
        if tokenizer is None:
            raise InvalidRequest("the tokenizer was left out: give token ids instead of text", "prompt")
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a prompt is no text that UTF-8 can hold: {error}", "prompt") from None
        return given, tokenizer.encode(given)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InvalidRequest(f"a prompt is {_named(given)}; {_FORMS}", "prompt")
    try:
        return text, _token_ids(given)
    except TypeError as error:
        raise InvalidRequest(
            f"a prompt has token ids that are no integers ({error}); {_FORMS}", "prompt"
        ) from None


class _Conversation(Body):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)


def conversation(
    messages: Iterable[Mapping[str, Any]], template: ChatTemplate | None
) -> list[dict[str, object]]:
    """Messages as the template takes them, checked as those of ``POST /v1/chat/completions`` are.

    Raises:
        InvalidRequest: they are no conversation; the field at fault is named.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"a conversation is {_named(messages)}; give a list of messages", "messages")
    given = {"messages": [dict(one) if isinstance(one, Mapping) else one for one in messages]}
    try:
        body = _Conversation.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error, given) from None
    return template_messages(body.messages, template)


def params_for(
    sampling_params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt.

    Raises:
        InvalidRequest: it is something else, or several are given, and not as many as there are prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    given: object = sampling_params
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)
    listed: list[SamplingParams] = []
    for one in given if is_list else [given]:  # type: ignore[attr-defined]
        if not isinstance(one, SamplingParams):
            raise InvalidRequest(
                f"sampling_params are {_named(one)}, they must be SamplingParams: one, or a list",
                "sampling_params",
            )
        listed.append(one)
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"{len(listed)} sampling_params for {num_prompts} prompts: give one, or one for each",
            "sampling_params",
        )
    return listed


def _token_ids(given: Iterable[Any]) -> list[int]:
    ids = list(given)
    # Plain integers, as they nearly always are, need no look at each.
    return ids if set(map(type, ids)) <= {int} else [_token_id(one) for one in ids]


def _token_id(value: Any) -> int:
    """An integer of any library's; ``True`` is a mistake, though Python and PyTorch would count with it."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{value!r} is a truth value")
    return index(value)


def _named(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"of type {type(value).__name__}"
