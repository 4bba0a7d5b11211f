"""Beam search keeps, ends and ranks as it promises, on numbers made by hand."""

from __future__ import annotations

import math

import pytest

from workers.engine.beam_search import BeamSearch
from workers.engine.outputs import BeamOutput
from workers.engine.request import BeamParams, FinishReason

EOS = 0
TABLE = {
    (): {1: 0.6, 2: 0.4},
    (1,): {3: 0.5, 4: 0.5},
    (2,): {3: 0.95, EOS: 0.05},
    (1, 3): {EOS: 1.0},
    (1, 4): {EOS: 1.0},
    (2, 3): {EOS: 1.0},
}
"""Next tokens and their probabilities, by what was said before."""


def search(
    table: dict[tuple[int, ...], dict[int, float]], params: BeamParams, max_tokens: int, min_tokens: int = 0
) -> tuple[list[BeamOutput], int]:
    """The outputs, and after how many steps they were there."""
    one = BeamSearch(params, 1, max_tokens, min_tokens, frozenset({EOS}))
    beams: list[tuple[int, ...]] = [()]
    num_steps = 0
    while not one.is_done:
        candidates = []
        for beam in beams:
            likely = sorted(table.get(beam, {9: 0.1}).items(), key=lambda item: -item[1])[: 2 * params.width]
            candidates.append([(token, math.log(p)) for token, p in likely])
        steps = one.advance(candidates)
        beams = [(*beams[step.parent], step.token_id) for step in steps]
        num_steps += 1
    return one.outputs(), num_steps


def test_a_wider_beam_finds_what_a_greedy_search_misses() -> None:
    narrow, _ = search(TABLE, BeamParams(1), 2)
    wide, _ = search(TABLE, BeamParams(2), 2)

    assert narrow[0].token_ids[0] == 1
    assert wide[0].token_ids == [2, 3]
    assert wide[0].logprob == pytest.approx(math.log(0.4 * 0.95))
    assert wide[0].finish_reason is FinishReason.LENGTH


def test_a_sequence_that_ends_is_kept_and_its_place_goes_to_others() -> None:
    found, _ = search(TABLE, BeamParams(2), 3)

    assert [one.token_ids for one in found] == [[2, 3, EOS], [1, 3, EOS]]
    assert {one.finish_reason for one in found} == {FinishReason.STOP}
    assert found[0].stop_token_id == EOS


def test_a_length_penalty_favours_long_or_short() -> None:
    table = {(): {EOS: 0.5, 1: 0.5}, (1,): {2: 0.55, 3: 0.45}}

    def first(length_penalty: float) -> list[int]:
        return search(table, BeamParams(2, length_penalty), 2)[0][0].token_ids

    assert first(0.0) == [EOS]
    assert first(3.0) == [1, 2]


def test_nothing_ends_before_its_least_length() -> None:
    found, _ = search(TABLE, BeamParams(2), 3, min_tokens=3)

    assert all(len(one.token_ids) == 3 for one in found)


def test_scores_count_the_prompt_and_not_the_end() -> None:
    found, _ = search(TABLE, BeamParams(2, 2.0), 3)

    assert found[0].score == pytest.approx(math.log(0.4 * 0.95) / (1 + 2) ** 2)


def test_when_a_search_stops_is_the_callers_choice() -> None:
    # Two ways end at once, with 0.32 each; one with 0.36 goes on, and is worth the more the longer it is.
    table = {(): {EOS: 0.32, 1: 0.36, 2: 0.32}, (2,): {EOS: 0.99}}
    table |= {(1,) * length: {1: 0.999, EOS: 0.001} for length in range(1, 11)}

    at_once, first = search(table, BeamParams(2, 3.0, early_stopping=True), 10)
    never, last = search(table, BeamParams(2, 3.0, early_stopping=None), 10)

    assert first == 2
    assert {one.finish_reason for one in at_once} == {FinishReason.STOP}
    assert last > first
    assert never[0].token_ids == [1] * 10
