"""Perplexity as the command tells it: of a text's own probabilities, and against another model token by token."""

from __future__ import annotations

import math

import pytest

from deploy.bench.perplexity import perplexity, token_losses
from shoal import LLM


def test_the_change_is_that_of_the_means_and_its_error_that_of_the_differences() -> None:
    found = perplexity([1.1, 2.1, 3.1, 2.1], [1.0, 2.0, 3.0, 2.0])

    assert found.num_tokens == 4
    assert found.perplexity == round(math.exp(2.1), 3)
    assert found.change_percent == round(100 * math.expm1(0.1), 2)
    assert found.standard_error == 0.0  # each token loses the same


def test_pieces_are_scored_from_their_second_token_on() -> None:
    llm = LLM(
        "deploy/bench/shapes/tiny", load_format="dummy", skip_tokenizer_init=True, kv_cache_gib=0.01,
        cpu_threads=1, max_model_len=32,
    )  # fmt: skip
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]

    together, alone = token_losses(llm, token_ids, 4), token_losses(llm, token_ids[4:8], 4)

    llm.close()
    assert len(together) == 6  # of 4, 4 and 1
    assert together[3:] == pytest.approx(alone)
    assert all(loss > 0 for loss in together)
