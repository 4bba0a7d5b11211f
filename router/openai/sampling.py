"""From a body's fields to the parameters of its choices, with the checks that need the model."""

from __future__ import annotations

from dataclasses import replace

from router.config import Limits
from router.generation import TextParams
from router.openai.schema import SamplingBody
from router.text.grammars import WantedGrammar
from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.request import ChoiceParams


def check_sampling(body: SamplingBody, num_prompts: int, vocab_size: int, limits: Limits) -> None:
    """Refuse what pydantic cannot see.

    Raises:
        InvalidRequest: with the field, its value and the limit.
    """
    num_choices = num_prompts * (body.n or 1)
    if num_choices > limits.max_choices:
        asked = f"n={body.n or 1} for {num_prompts} prompts" if num_prompts > 1 else f"n={body.n}"
        raise InvalidRequest(f"n: {asked} is {num_choices} choices, the limit is {limits.max_choices}", "n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only allowed with stream=true", "stream_options")
    stops = body.stop_strings
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(f"stop: {len(stops)} strings, the limit is {limits.max_stop_strings}", "stop")
    for stop in stops:
        if not 0 < len(stop) <= limits.max_stop_chars:
            raise InvalidRequest(
                f"stop: a string of {len(stop)} characters; each needs 1 to {limits.max_stop_chars}", "stop"
            )
    for token_id in body.stop_token_ids or ():
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"stop_token_ids: {token_id} is beyond the vocabulary of {vocab_size}", "stop_token_ids"
            )


def check_num_logprobs(num_logprobs: int, param: str, limits: Limits) -> None:
    """Refuse more alternatives per token than the limit."""
    if num_logprobs > limits.max_logprobs:
        raise InvalidRequest(f"{param}: {num_logprobs} asked for, the limit is {limits.max_logprobs}", param)


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model has no embedding for."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"{param}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", param
        )


def resolve_max_tokens(
    asked: int | None, param: str, longest_prompt: int, max_model_len: int, default: int | None = None
) -> int:
    """Tokens that each choice may have: what was asked for, else ``default``, else all that fit.

    Raises:
        PromptTooLong: prompt and output together exceed the context.
    """
    room = max_model_len - longest_prompt
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise PromptTooLong(
            f"prompt has {longest_prompt} tokens and {param} is {asked}, together {longest_prompt + asked}; "
            f"this model takes {max_model_len}: lower {param} or shorten the prompt",
            param,
        )
    return asked


def choice_params(
    body: SamplingBody,
    max_tokens: int,
    num_logprobs: int | None,
    seed: int,
    vocab_size: int,
    grammar: WantedGrammar | None = None,
) -> list[ChoiceParams]:
    """Parameters of each of the ``n`` choices of a prompt; they differ in their index only."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than max_tokens ({max_tokens})", "min_tokens")
    base = ChoiceParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, vocab_size),
        seed=(seed if body.seed is None else body.seed) % 2**64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        grammar=grammar.text if grammar is not None else "",
    )
    return [base, *(replace(base, choice_index=i) for i in range(1, body.n or 1))]


def text_params(body: SamplingBody) -> TextParams:
    """What is done with the tokens on this side."""
    return TextParams(
        stop=tuple(body.stop_strings),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _logit_bias(body: SamplingBody, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not (len(key) < 10 and key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:20]!r} is not a token id (0 to {vocab_size - 1})", "logit_bias"
            )
        bias[int(key)] = value
    return bias


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
