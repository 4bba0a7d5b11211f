"""Log-probabilities in the two shapes of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.proto import shoal_pb2 as pb
from router.generation import Delta
from router.text.detokenizer import Detokenizer, TokenTable

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say (as in vLLM)."""


def chat_logprobs(
    delta: Delta, logprobs: pb.TokenLogprobs, num_top: int, table: TokenTable
) -> dict[str, Any]:
    """One entry of a chat choice's ``logprobs.content``."""
    assert delta.token_id is not None, "log-probabilities belong to a token"
    top = zip(logprobs.top_token_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True)
    return {
        **_chat_token(delta.token_id, logprobs.sampled, table),
        "top_logprobs": [_chat_token(token_id, value, table) for token_id, value in top],
    }


class CompletionLogprobs:
    """Builds a completion choice's ``logprobs``, whose offsets count characters of its text."""

    def __init__(self, num_top: int, table: TokenTable, first_offset: int) -> None:
        self._num_top = num_top
        self._table = table
        self._offset = first_offset

    def entry(self, delta: Delta, logprobs: pb.TokenLogprobs) -> dict[str, list[Any]]:
        """The four lists, of one token."""
        assert delta.token_id is not None, "log-probabilities belong to a token"
        offset = self._offset
        self._offset += len(delta.text)
        return {
            "tokens": [_spelling(delta.token_id, self._table)],
            "token_logprobs": [_finite(logprobs.sampled)],
            "top_logprobs": [_likeliest(delta.token_id, logprobs, self._num_top, self._table)],
            "text_offset": [offset],
        }


def scored_prompt(
    token_ids: Sequence[int], scores: Sequence[pb.TokenLogprobs], num_top: int, table: TokenTable
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: of each token of the prompt, by token id; nothing is known of the first.

    A token that is not among the likeliest has the rank that it has among all.
    """
    found: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=True):
        ranked = list(zip(score.top_token_ids, score.top_logprobs, strict=True))[:num_top]
        ranks = {token_id: score.rank or None, **{i: rank for rank, (i, _) in enumerate(ranked, start=1)}}
        found.append(
            {
                str(i): {
                    "logprob": _finite(value),
                    "rank": ranks[i],
                    "decoded_token": _spelling(i, table),
                }
                for i, value in [(token_id, score.sampled), *ranked]
            }
        )
    return found


def echoed_entries(
    token_ids: Sequence[int], scores: Sequence[pb.TokenLogprobs], num_top: int, table: TokenTable
) -> dict[str, list[Any]]:
    """The four lists, of an echoed prompt's tokens; nothing is known of the first."""
    tokens = [_spelling(i, table) for i in token_ids]
    offsets, text = [], Detokenizer(table)
    num_chars = 0
    for token_id in token_ids:
        offsets.append(num_chars)
        num_chars += len(text.push(token_id))
    tops = [
        _likeliest(token_id, score, num_top, table)
        for token_id, score in zip(token_ids[1:], scores, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None, *(_finite(score.sampled) for score in scores)][: len(tokens)],
        "top_logprobs": [None, *tops][: len(tokens)],
        "text_offset": offsets,
    }


def join_entries(entries: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The four lists, of all tokens."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [value for entry in entries for value in entry[key]] for key in keys}


def _likeliest(
    token_id: int, logprobs: pb.TokenLogprobs, num_top: int, table: TokenTable
) -> dict[str, float]:
    """The likeliest tokens, and the one that stands there, which may be one more."""
    found: dict[str, float] = {}
    for i, value in zip(logprobs.top_token_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True):
        found.setdefault(_spelling(i, table), _finite(value))  # halves of characters are spelled alike
    found[_spelling(token_id, table)] = _finite(logprobs.sampled)
    return found


def _chat_token(token_id: int, logprob: float, table: TokenTable) -> dict[str, Any]:
    data = table.bytes_of(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _spelling(token_id: int, table: TokenTable) -> str:
    return table.bytes_of(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
