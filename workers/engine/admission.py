"""What is refused at the door: requests that no amount of waiting would let finish."""

from __future__ import annotations

import logging

from workers.engine.config import EngineConfig
from workers.engine.errors import InvalidRequest, PromptTooLong, UserError
from workers.engine.request import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, ChoiceParams, EngineRequest

log = logging.getLogger("shoal.engine")


def context_len(asked_len: int | None, model_len: int, num_blocks: int, block_size: int) -> int:
    """Most tokens of a request: what was asked for, else what the model takes, as far as the blocks hold it.

    Raises:
        UserError: the blocks do not hold the length that was asked for.
    """
    num_slots = num_blocks * block_size
    if asked_len is not None and asked_len > num_slots:
        raise UserError(
            f"max_model_len is {asked_len:,}, {num_blocks:,} KV blocks of {block_size} hold {num_slots:,} tokens: "
            "lower max_model_len or give more blocks",
            "max_model_len",
        )
    wanted_len = asked_len or model_len
    if wanted_len > num_slots:
        log.warning(
            "the context is cut from %d to %d tokens, which is what %d KV blocks of %d hold",
            wanted_len, num_slots, num_blocks, block_size,
        )  # fmt: skip
    return min(wanted_len, num_slots)


def max_len_of(request: EngineRequest, config: EngineConfig) -> int:
    """Tokens known at which the request ends: its own limit, or the context's where that is lower."""
    return min(len(request.prompt_token_ids) + request.params.max_tokens, most_known(request.params, config))


def most_known(params: ChoiceParams, config: EngineConfig) -> int:
    """Most tokens known of a request; the one that is sampled beside a vector is thrown away and takes no place."""
    return config.max_model_len + (params.pooling is not None)


def most_blocks(request: EngineRequest, config: EngineConfig) -> int:
    """Blocks that the request may come to hold. The last token is never computed, so it needs no slot."""
    num_slots = max_len_of(request, config) - 1
    num_blocks = -(-num_slots // config.block_size)
    # Beams have at least the prompt's full blocks in common.
    num_shared = min(len(request.prompt_token_ids) // config.block_size, num_blocks)
    return num_shared + request.params.num_rows * (num_blocks - num_shared)


def validate(request: EngineRequest, config: EngineConfig) -> None:
    """Return if the request can be served to its end by an otherwise empty engine.

    Raises:
        InvalidRequest: a field has a value that cannot be served.
        PromptTooLong: prompt and output exceed the context or the KV pool.
    """
    num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    if request.params.pooling is not None and max_tokens != 1:
        raise InvalidRequest(f"a pooled request has max_tokens 1, got {max_tokens}", param="max_tokens")
    if num_prompt_tokens >= most_known(request.params, config):
        answer = "" if request.params.pooling is not None else ", the first token of the answer included"
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens:,} tokens; this model takes {config.max_model_len:,}{answer}; shorten "
            "the prompt",
            param="prompt",
        )
    if request.params.beams is not None:
        _validate_beams(request, config)
    num_blocks = most_blocks(request, config)
    if num_blocks > config.num_blocks:
        num_tokens = max_len_of(request, config)
        beams = f" in each of {request.params.num_rows} beams" if request.params.num_rows > 1 else ""
        raise PromptTooLong(
            f"prompt and output may come to {num_tokens:,} tokens{beams}, the KV cache holds {config.num_slots:,}; "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    num_tokens = num_prompt_tokens + len(request.output_token_ids)
    if num_tokens > config.max_model_len:
        raise PromptTooLong(
            f"prompt and earlier output have {num_tokens:,} tokens; this model takes "
            f"{config.max_model_len:,}",
            param="prompt",
        )
    _validate_token_ids(request, config)


def _validate_beams(request: EngineRequest, config: EngineConfig) -> None:
    """A beam search has room for its beams, and nothing else that changes what is likely."""
    params, beams = request.params, request.params.beams
    assert beams is not None, "only beam searches come here"
    limit = min(MAX_BEAM_WIDTH, config.max_num_seqs)
    if not 1 <= beams.width <= limit:
        raise InvalidRequest(
            f"a beam search of width {beams.width} is asked for, it must be from 1 to {limit}"
            + (", what max_num_seqs lets run at once" if limit < MAX_BEAM_WIDTH else ""),
            param="beam_width",
        )
    if not abs(beams.length_penalty) <= MAX_LENGTH_PENALTY:  # also for NaN
        raise InvalidRequest(
            f"length_penalty is {beams.length_penalty}, it must be from {-MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}",
            param="length_penalty",
        )
    others = {
        "grammar": params.grammar,
        "thinking_budget": params.thinking_budget is not None,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "pooling": params.pooling,
        "prompt_logprobs": params.num_prompt_logprobs is not None,
        "logprobs": params.num_logprobs is not None,
    }
    if wrong := [name for name, value in others.items() if value]:
        raise InvalidRequest(
            f"{wrong[0]} cannot be combined with a beam search, which ranks by the model's own probabilities; "
            "leave it out",
            param=wrong[0],
        )
    if request.output_token_ids:
        raise InvalidRequest("a beam search begins with the prompt alone", param="output_token_ids")


def _validate_token_ids(request: EngineRequest, config: EngineConfig) -> None:
    """Token ids must be in the vocabulary, or at least be int32, which block hashes are made of."""
    limit = 2**31 if config.vocab_size is None else config.vocab_size
    for token_ids in (request.prompt_token_ids, request.output_token_ids):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limit:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < limit)
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {limit:,}", param="prompt")
