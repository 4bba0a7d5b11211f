"""From a body's fields to the parameters of its choices, with the checks that need the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.config import Limits
from router.generation import TextParams
from router.journal import PromptTerms
from router.openai.beams import beam_params
from router.openai.contest import Contest
from router.openai.schema import SamplingBody
from router.text.grammars import WantedGrammar
from router.text.stop import StopStrings
from router.text.tokenizer import Tokenizer
from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.request import ChoiceParams


def check_sampling(body: SamplingBody, num_prompts: int, vocab_size: int, limits: Limits) -> None:
    """Refuse what pydantic cannot see.

    Raises:
        InvalidRequest: with the field, its value and the limit.
    """
    _check_best_of(body, num_prompts, limits)
    num_choices = num_prompts * (body.n or 1)
    if num_choices > limits.max_choices:
        asked = f"n={body.n or 1} for {num_prompts} prompts" if num_prompts > 1 else f"n={body.n}"
        raise InvalidRequest(f"n: {asked} is {num_choices} choices, the limit is {limits.max_choices}", "n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: only allowed with stream=true", "stream_options")
    stops = body.stop_strings
    if len(stops) > limits.max_stop_strings:
        raise InvalidRequest(f"stop: {len(stops)} strings, the limit is {limits.max_stop_strings}", "stop")
    _check_lengths(body.stop, "stop", limits)
    check_token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")
    if body.prompt_logprobs is not None:
        check_num_logprobs(body.prompt_logprobs, "prompt_logprobs", limits)
        if body.stream:
            raise InvalidRequest("prompt_logprobs: only without stream", "prompt_logprobs")
    check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    _check_lengths(body.bad_words, "bad_words", limits)


def _check_best_of(body: SamplingBody, num_prompts: int, limits: Limits) -> None:
    best_of, num_given = body.best_of, body.n or 1
    if best_of is None:
        return
    if num_prompts * best_of > limits.max_choices:
        raise InvalidRequest(
            f"best_of: {best_of} for {num_prompts} prompts is {num_prompts * best_of} choices, the limit is "
            f"{limits.max_choices}",
            "best_of",
        )
    if best_of < num_given:
        raise InvalidRequest(f"best_of: {best_of} is less than n ({num_given})", "best_of")
    if best_of > num_given and body.stream:
        raise InvalidRequest(
            "best_of: the best are known at the end only, they cannot be streamed", "best_of"
        )


def prompt_terms(body: SamplingBody, max_model_len: int, asked_tokens: int | None) -> PromptTerms:
    """How the body's prompts are treated."""
    keep_last = body.truncate_prompt_tokens
    if keep_last == -1:
        keep_last = max(1, max_model_len - max(1, asked_tokens or 1))
    return PromptTerms(
        keep_last, body.cache_salt or "", body.priority or 0, session=body.prompt_cache_key or ""
    )


def check_num_logprobs(num_logprobs: int, param: str, limits: Limits) -> None:
    """Refuse more alternatives per token than the limit."""
    if num_logprobs > limits.max_logprobs:
        raise InvalidRequest(f"{param}: {num_logprobs} asked for, the limit is {limits.max_logprobs}", param)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model has no embedding for; the first of them is named by its place."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        place = next(place for place, i in enumerate(token_ids) if not 0 <= i < vocab_size)
        named = f"{param}[{place}]"
        raise InvalidRequest(
            f"{named}: token id {token_ids[place]} is outside the vocabulary (0 to {vocab_size - 1})", named
        )


def name_of_input(given: object, place: int, field: str) -> str:
    """What an error about number ``place`` of ``field`` calls it: ``prompt``, or where a list came ``prompt[3]``.

    A list of token ids is one prompt.
    """
    is_one = not isinstance(given, list) or isinstance(given[0], int)
    return field if is_one else f"{field}[{place}]"


def _check_lengths(given: str | list[str] | None, param: str, limits: Limits) -> None:
    for place, text in enumerate([given] if isinstance(given, str) else given or ()):
        if not 0 < len(text) <= limits.max_stop_chars:
            named = name_of_input(given, place, param)
            raise InvalidRequest(
                f"{named}: has {len(text)} characters, each needs 1 to {limits.max_stop_chars}", named
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
    tokenizer: Tokenizer,
    grammar: WantedGrammar | None = None,
) -> list[ChoiceParams]:
    """Parameters of each choice of a prompt, ``best_of`` of them included; they differ in their index only.

    Choices of a beam search are all of one search, and have the same.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than max_tokens ({max_tokens})", "min_tokens")
    if body.allowed_token_ids is not None and grammar is not None:
        raise InvalidRequest(
            f"allowed_token_ids: not together with {grammar.param}, which says what is allowed",
            "allowed_token_ids",
        )
    contest = contest_of(body)
    if contest is not None and num_logprobs is None:
        num_logprobs = 0  # what the contest goes by
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
        logit_bias=_logit_bias(body, tokenizer.vocab_size),
        seed=(seed if body.seed is None else body.seed) % 2**64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        grammar=grammar.text if grammar is not None else "",
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=_bad_words(body.bad_words or (), tokenizer),
        beams=beam_params(body, grammar.param if grammar is not None else None),
    )
    if base.beams is not None:
        return [base] * (body.n or 1)
    num_choices = contest.num_choices if contest is not None else body.n or 1
    return [base, *(replace(base, choice_index=i) for i in range(1, num_choices))]


def contest_of(body: SamplingBody) -> Contest | None:
    """What ``best_of`` asks for; None if all choices are given."""
    num_given = body.n or 1
    if body.use_beam_search or body.best_of is None or body.best_of <= num_given:
        return None
    return Contest(num_given, body.best_of)


def text_params(body: SamplingBody) -> TextParams:
    """What is done with the tokens on this side."""
    return TextParams(
        stop=StopStrings(body.stop_strings) if body.stop_strings else None,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it stands after a space and as it stands without one."""
    spelled = [form for word in words for form in (word, f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in spelled)
    return tuple(dict.fromkeys(token_ids for token_ids in found if token_ids))


def _logit_bias(body: SamplingBody, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        is_number = len(key) < 10 and key.isascii() and key.isdigit()
        if not (is_number and key == str(int(key)) and int(key) < vocab_size):  # "05" may stand beside "5"
            raise InvalidRequest(
                f"logit_bias: {key[:20]!r} is not a token id (0 to {vocab_size - 1}, in plain digits)",
                "logit_bias",
            )
        bias[int(key)] = value
    return bias


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
