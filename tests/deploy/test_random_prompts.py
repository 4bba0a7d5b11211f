"""Benchmarks draw prompts from any vocabulary."""

from __future__ import annotations

import random

import pytest

from deploy.bench.random_prompts import random_prompt


@pytest.mark.parametrize("vocab_size", [2, 98, 101, 50_000])
def test_a_prompt_is_within_the_vocabulary(vocab_size: int) -> None:
    prompt = random_prompt(random.Random(0), vocab_size, 50)

    assert len(prompt) == 50
    assert 0 < min(prompt) <= max(prompt) < vocab_size
    assert vocab_size < 200 or min(prompt) >= 100
