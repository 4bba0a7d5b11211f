"""Log-probabilities of a prompt's own tokens, in one piece or in chunks, never left out for a cached prefix."""

from __future__ import annotations

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.request import ChoiceParams, EngineRequest

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=50,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_ids=(7,),
)
PROMPT = [(i * 7 + 3) % 50 for i in range(40)]


def first_output(rank, prompt: list[int], budget: int, engine: Engine | None = None, **fields):
    engine = engine or Engine(
        EngineConfig(max_model_len=128, num_blocks=64, max_num_batched_tokens=budget, run_ahead=0)
    )
    engine.add(EngineRequest("r", prompt, ChoiceParams(max_tokens=2, temperature=0.0, **fields)), 0.0)
    outputs = []
    while engine.has_work:
        while (plan := engine.plan(0.0)) is not None:
            rank.launch(plan)
        outputs += engine.apply(rank.collect(), 0.0)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    return outputs[0]


@pytest.mark.parametrize("budget", [64, 13, 1])
def test_scores_are_those_of_the_model_however_it_is_cut(make_rank, budget: int) -> None:
    rank = make_rank(load_format="dummy", model_config=CONFIG, seed=3)

    scores = first_output(rank, PROMPT, budget, num_prompt_logprobs=3).prompt_logprobs

    assert len(scores) == len(PROMPT) - 1
    for position in (1, 20, 39):  # what would be sampled after the tokens before it
        there = first_output(rank, PROMPT[:position], 64, num_logprobs=50).logprobs[0]
        by_token = dict(zip(there.top_token_ids, there.top_logprobs, strict=True))
        mine = scores[position - 1]
        assert mine.sampled == pytest.approx(by_token[PROMPT[position]], abs=1e-4)
        assert mine.top_logprobs == pytest.approx(there.top_logprobs[:3], abs=1e-4)
        assert mine.rank == there.top_token_ids.index(PROMPT[position]) + 1


def test_a_cached_prefix_is_scored_anew(make_rank) -> None:
    rank = make_rank(load_format="dummy", model_config=CONFIG, seed=3)
    engine = Engine(EngineConfig(max_model_len=128, num_blocks=64, run_ahead=0))

    first = first_output(rank, PROMPT, 64, engine, num_prompt_logprobs=0)
    again = first_output(rank, PROMPT, 64, engine, num_prompt_logprobs=0)
    plain = first_output(rank, PROMPT, 64, engine)

    assert [one.sampled for one in again.prompt_logprobs] == pytest.approx(
        [one.sampled for one in first.prompt_logprobs], abs=1e-5
    )
    assert again.num_cached_tokens == 0
    assert plain.num_cached_tokens == 32
    assert plain.prompt_logprobs is None


def test_a_prompt_of_one_token_has_no_scores(make_rank) -> None:
    rank = make_rank(load_format="dummy", model_config=CONFIG, seed=3)

    assert first_output(rank, [5], 64, num_prompt_logprobs=1).prompt_logprobs == []
    assert torch.get_num_threads() == 1
