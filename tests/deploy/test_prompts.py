"""Prompts as offline callers give them: every form there is, and a clear word for what is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deploy.offline.prompts import as_list, conversation, encoded, params_for
from deploy.offline.sampling_params import SamplingParams
from workers.engine.errors import InvalidRequest


def generated() -> Iterator[str]:
    yield from ("a", "b")


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("a", ["a"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (["a", [1, 2]], ["a", [1, 2]]),
        (generated(), ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        ([], []),
        (iter(()), []),
    ],
)
def test_prompts_come_as_one_or_as_several(given: Any, listed: list[Any]) -> None:
    assert as_list(given) == listed


@pytest.mark.parametrize(
    ("given", "text", "token_ids"),
    [
        ([3, 5], None, [3, 5]),
        (np.array([3, 5]), None, [3, 5]),
        ({"prompt_token_ids": (3, 5)}, None, [3, 5]),
        ({"prompt_token_ids": [3, 5], "prompt": "a"}, "a", [3, 5]),
    ],
)
def test_token_ids_need_no_tokenizer(given: Any, text: str | None, token_ids: list[int]) -> None:
    assert encoded(given, None) == (text, token_ids)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "is None"),
        (b"text", "is of type bytes"),
        (3.5, "is of type float"),
        ({"prompt": None}, "is None"),
        ({"prompts": "a"}, "needs 'prompt'"),
        ({"prompt": "a", "x": 1}, "has 'x', it may have"),
        ({"prompt": [3, 5]}, "text is of type list"),
        ({"prompt": 5, "prompt_token_ids": [3]}, "text is of type int"),
        ([1.5], "no integers"),
        (["1"], "no integers"),
        ([True, 5], "no integers .True is a truth value"),
        (np.array([True, False]), "no integers"),
        (torch.tensor([True]), "no integers"),
        ("a", "the tokenizer was left out"),
    ],
)
def test_what_is_no_prompt_is_told_so(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        encoded(given, None)


@pytest.mark.parametrize("given", [None, 3, b"text"])
def test_what_is_no_list_of_prompts_is_told_so(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="give text, a list of token ids"):
        as_list(given)


def test_parameters_are_for_all_prompts_or_one_each() -> None:
    some = [SamplingParams(n=1), SamplingParams(n=2)]

    assert params_for(some[0], 2) == [some[0]] * 2
    assert params_for(iter(some), 2) == some
    with pytest.raises(InvalidRequest, match="2 sampling_params for 3 prompts"):
        params_for(some, 3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"n": 1}, "are of type dict, they must be SamplingParams"),
        (SamplingParams, "are the class SamplingParams"),
        (5, "are of type int"),
        ([SamplingParams(), None], "are None"),
    ],
)
def test_what_are_no_sampling_parameters_is_told_so(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        params_for(given, 2)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": "a"}, {"content": "a"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
        (["a"], "messages[0]"),
        ([], "messages"),
        ("a", "messages"),
        (5, "messages"),
    ],
    ids=str,
)
def test_messages_are_checked_as_over_http(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation(messages, None)

    assert caught.value.param == param


def test_messages_reach_the_template_as_over_http() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    told = conversation(
        ({"role": "developer", "content": parts}, {"role": "assistant", "tool_calls": [call]}), None
    )

    assert told[0] == {"role": "system", "content": "ab"}
    assert told[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"x": 1}}}]
