"""Stop strings: what is shown does not depend on how the text came."""

from __future__ import annotations

import random
import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher, StopStrings

TEXTS = st.text(alphabet="ab<é", max_size=40)
STOPS = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=6), min_size=1, max_size=4)


def whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=10), st.booleans())
def test_any_chunking_shows_the_same_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_in_output=include)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]

    shown = "".join(matcher.feed(text[start:end]) for start, end in pairwise(borders))
    shown += matcher.flush()

    assert (shown, matcher.matched) == whole(text, stops, include)


def test_no_more_is_held_back_than_could_become_a_stop_string() -> None:
    matcher = StopMatcher(StopStrings(["</end>"]))

    assert matcher.feed("text <") == "text "
    assert matcher.feed("/e") == ""
    assert matcher.feed("x") == "</ex"


def test_stop_strings_take_little_more_room_than_their_characters() -> None:
    rng = random.Random(0)
    stops = ["".join(rng.choices("abcdefgh", k=1024)) for _ in range(64)]
    tracemalloc.start()

    shared = StopStrings(stops)
    matchers = [StopMatcher(shared) for _ in range(128)]

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(matchers) == 128
    assert peak < 2 * 64 * 1024


@pytest.mark.parametrize("unit", ["a", "ab", "aab", "a" * 511 + "c"])
def test_a_character_costs_the_same_however_long_the_output_is(unit: str) -> None:
    stops = ["a" * 1023 + "b", "ab" * 511 + "c", "a" * 512 + "b" + "a" * 511, "aab" * 300 + "d"]

    def cost_s(num_chars: int) -> float:
        matcher = StopMatcher(StopStrings(stops))
        text = (unit * num_chars)[:num_chars]
        start = time.process_time()
        for i in range(0, num_chars, 4):
            matcher.feed(text[i : i + 4])
        return time.process_time() - start

    assert cost_s(40_000) < 1.0  # 25 us a character, of which a hundredth part is usual
