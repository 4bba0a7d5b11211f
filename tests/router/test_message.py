"""A message's thinking, text and calls, told apart the same however its text is cut into pieces."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.message import MessageParser
from router.text.reasoning import REASONING, ReasoningParser
from router.text.tools.call_parser import CallParser
from router.text.tools.events import CallArguments, CallBegin, Content, Reasoning
from router.text.tools.formats import FORMATS

NAMES = frozenset(("weather", "now"))
BONN = '{"city": "Bonn", "more": [1, {"a": "}\\"]"}]}'
OBJECT = '{"name": "weather", "arguments": ' + BONN + "}"
NOW = '{"name": "now", "arguments": {}}'
WORDS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "[ARGS]", "<", "</", "[",
    "]", "{", "}", ",", ";", ":", " ", "\n", '"', '"name"', '"arguments"', '"parameters"', '"weather"', '"now"',
    "weather", "now", "hello", "é", "\\", "1", "null", OBJECT, NOW, BONN,
)  # fmt: skip


def parser(name: str, reasoning: str | None = None, is_thinking: bool | None = None) -> MessageParser:
    thinking = ReasoningParser(REASONING[reasoning], is_thinking=is_thinking) if reasoning else None
    return MessageParser(thinking, CallParser(FORMATS[name].syntax, NAMES))


def read(message: MessageParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thinking, text, and calls with their arguments."""
    reasoning, content, calls = "", "", []
    for event in [event for piece in pieces for event in message.feed(piece)] + message.end():
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallBegin(number, name):
                assert number == len(calls)
                calls.append((name, ""))
            case CallArguments(number, text):
                assert number == len(calls) - 1
                calls[number] = (calls[number][0], calls[number][1] + text)
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", "", [("weather", BONN)]),
        (
            "hermes",
            f"Let me see.\n<tool_call>{NOW}</tool_call>\n<tool_call>{OBJECT}</tool_call>\n",
            "Let me see.",
            [("now", "{}"), ("weather", BONN)],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "other"}</tool_call> x', '<tool_call>{"name": "other"}</tool_call> x', []),
        ("hermes", "a <tool_call> b", "a <tool_call> b", []),
        ("hermes", "a < b \n", "a < b \n", []),
        ("hermes", OBJECT, OBJECT, []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        ("llama3_json", OBJECT.replace("arguments", "parameters"), "", [("weather", BONN)]),
        ("llama3_json", f"<|python_tag|>{NOW}; {OBJECT}", "", [("now", "{}"), ("weather", BONN)]),
        ("llama3_json", 'I say {"name": "now"}', 'I say {"name": "now"}', []),
        ("llama3_json", '{"x": 1}', '{"x": 1}', []),
        ("mistral", f"[TOOL_CALLS] [{NOW}, {OBJECT}]", "", [("now", "{}"), ("weather", BONN)]),
        ("mistral", f"Well: [TOOL_CALLS]weather{BONN}", "Well:", [("weather", BONN)]),
        ("mistral", f"[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]weather{BONN}", "", [("now", "{}"), ("weather", BONN)]),
        ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
        ("json", f"\n[{NOW}, {OBJECT}]", "", [("now", "{}"), ("weather", BONN)]),
        ("json", NOW, "", [("now", "{}")]),
        ("json", "[1, 2]", "[1, 2]", []),
        ("json", "", "", []),
    ],
)  # fmt: skip
def test_calls_are_found_where_they_are(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(parser(name), [text]) == ("", content, calls)
    assert read(parser(name), list(text)) == ("", content, calls)


@pytest.mark.parametrize(
    ("name", "is_thinking", "text", "reasoning", "content"),
    [
        ("qwen3", None, "<think>\nhm <b>\n</think>\n\nYes. ", "hm <b>", "Yes. "),
        ("qwen3", True, "hm</think>Yes", "hm", "Yes"),
        ("qwen3", False, " Yes </think>", "", " Yes </think>"),
        ("qwen3", None, " Yes", "", " Yes"),
        ("qwen3", None, "<think>cut off", "cut off", ""),
        ("deepseek_r1", None, "hm</think>\nYes", "hm", "Yes"),
        ("deepseek_r1", None, "<think>\n</think>Yes", "", "Yes"),
        ("deepseek_r1", None, "all of it thought", "all of it thought", ""),
        ("deepseek_r1", None, "<thi", "<thi", ""),
    ],
)
def test_thinking_is_told_apart(
    name: str, is_thinking: bool | None, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        message = MessageParser(ReasoningParser(REASONING[name], is_thinking=is_thinking), None)
        assert read(message, pieces) == (reasoning, content, [])


def test_a_call_may_follow_thinking() -> None:
    text = f"<think>which?\n</think>\n\n<tool_call>{NOW}</tool_call>"

    assert read(parser("hermes", "qwen3"), [text]) == ("which?", "", [("now", "{}")])


@settings(max_examples=600, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    name=st.sampled_from(sorted(FORMATS)),
    reasoning=st.sampled_from([None, *sorted(REASONING)]),
    is_thinking=st.sampled_from([None, True, False]),
    seed=st.integers(0, 2**16),
)
def test_no_cut_changes_what_is_read(
    words: list[str], name: str, reasoning: str | None, is_thinking: bool | None, seed: int
) -> None:
    text = "".join(words)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randint(0, 9))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = read(parser(name, reasoning, is_thinking), [text])

    assert read(parser(name, reasoning, is_thinking), pieces) == whole
    assert read(parser(name, reasoning, is_thinking), list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(
    values=st.dictionaries(
        st.text(max_size=4), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)
    ),
    name=st.sampled_from(["hermes", "llama3_json", "mistral", "json"]),
    is_indented=st.booleans(),
)
def test_arguments_come_out_as_they_were_spelled(
    values: dict[str, object], name: str, is_indented: bool
) -> None:
    spelled = json.dumps(values, indent=2 if is_indented else None, ensure_ascii=False)
    key = FORMATS[name].arguments_key
    call = f'{{"name": "now", "{key}": {spelled}}}'
    syntax = FORMATS[name].syntax
    text = f"[TOOL_CALLS][{call}]" if name == "mistral" else f"{syntax.begin}{call}{syntax.end}"

    assert read(parser(name), list(text)) == ("", "", [("now", spelled)])
