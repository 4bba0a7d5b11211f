"""Prompts of random tokens: nothing about them is cached, and no model ends early."""

from __future__ import annotations

import random

_FIRST = 100
"""Token ids below are often special ones."""


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids of a prompt; of a small vocabulary from the upper half."""
    first = min(_FIRST, vocab_size // 2)
    return [rng.randrange(first, vocab_size) for _ in range(num_tokens)]
