"""What a message's parsers cost: as much for the last token of a long output as for the first."""

from __future__ import annotations

import time

import pytest

from router.text.reasoning import REASONING, ReasoningParser
from router.text.tools.call_parser import CallParser
from router.text.tools.events import CallArguments, Content
from router.text.tools.formats import FORMATS


@pytest.mark.parametrize(
    ("format_name", "head", "unit"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', "abcd"),
        ("hermes", '<tool_call>{"name":"f","arguments":"', "abcd"),
        ("hermes", '<tool_call>{"arguments":{"a":"', "abcd"),
        ("hermes", '<tool_call>{"x":"', "abcd"),
        ("hermes", "<tool_call>", "    "),
        ("json", "", " \n\n "),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}', "    "),
        ("mistral", "[TOOL_CALLS]f", "[[[["),
        ("mistral", "[TOOL_CALLS]f", "    "),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "    "),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a":"', "abcd"),
    ],
)
def test_a_token_costs_the_same_however_much_was_said_before(format_name: str, head: str, unit: str) -> None:
    parser = CallParser(FORMATS[format_name].syntax, {"f"})
    parser.feed(head)
    start = time.process_time()

    for _ in range(50_000):
        parser.feed(unit)
    parser.end()

    assert time.process_time() - start < 3.0  # 60 us a token, of which a quarter is usual


@pytest.mark.parametrize("space", [" " * 10, " " * 200])
def test_a_name_with_space_around_it_is_read_alike_in_one_piece_and_in_many(space: str) -> None:
    text = f'[TOOL_CALLS]f{space}[ARGS]{space}{{"a": 1}}'

    def events(pieces: list[str]) -> list[str]:
        parser = CallParser(FORMATS["mistral"].syntax, {"f"})
        found = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
        return [
            "".join(event.text for event in found if isinstance(event, kind))
            for kind in (Content, CallArguments)
        ]

    assert events([text]) == events(list(text))


@pytest.mark.parametrize(
    ("head", "unit"), [("", "    "), ("<think>", "    "), ("<think>a", "    "), ("<think>a", "</th")]
)
def test_a_token_of_thinking_costs_the_same_however_much_was_said_before(head: str, unit: str) -> None:
    parser = ReasoningParser(REASONING["qwen3"], is_thinking=None)
    parser.feed(head)
    start = time.process_time()

    for _ in range(50_000):
        parser.feed(unit)
    parser.end()

    assert time.process_time() - start < 1.5
