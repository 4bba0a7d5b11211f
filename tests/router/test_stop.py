"""Stop strings: what is shown does not depend on how the text came."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher

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
    matcher = StopMatcher(stops, include_in_output=include)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]

    shown = "".join(matcher.feed(text[start:end]) for start, end in pairwise(borders))
    shown += matcher.flush()

    assert (shown, matcher.matched) == whole(text, stops, include)


def test_no_more_is_held_back_than_could_become_a_stop_string() -> None:
    matcher = StopMatcher(["</end>"])

    assert matcher.feed("text <") == "text "
    assert matcher.feed("/e") == ""
    assert matcher.feed("x") == "</ex"
