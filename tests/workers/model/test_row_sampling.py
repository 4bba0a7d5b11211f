"""A rank samples each row as its request asked, on a tiny random model."""

from __future__ import annotations

import math

import pytest

from workers.checkpoint.model_config import ModelConfig
from workers.engine.request import ChoiceParams

VOCAB = 50
EOS = 7
CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_ids=(EOS,),
)
PROMPTS = [[1, 2, 3], [4] * 20, list(range(17)), [9]]


@pytest.fixture
def tiny(make_rank, plan_driver):
    """A driver of the tiny model."""
    return plan_driver.PlanDriver(make_rank(load_format="dummy", model_config=CONFIG, seed=3), 64)


def params(**fields: object) -> ChoiceParams:
    return ChoiceParams(**{"max_tokens": 99, **fields})


def test_the_same_seed_gives_the_same_tokens_in_any_row_beside_any_neighbours(tiny) -> None:
    wanted = [params(seed=seed, top_p=0.95, top_k=30, min_p=0.01) for seed in range(4)]
    together, _ = tiny.generate(PROMPTS, 12, wanted)

    for prompt, one, output in zip(PROMPTS, wanted, together, strict=True):
        alone, _ = tiny.generate([prompt], 12, one, first_row=5, chunk=6)
        assert alone == [output]
    assert len(set(map(tuple, together))) == 4


def test_choices_of_one_seed_differ_and_go_on_elsewhere_as_they_would_have(tiny) -> None:
    choices = [params(seed=1, choice_index=index) for index in range(3)]
    outputs, _ = tiny.generate([PROMPTS[0]] * 3, 10, choices)
    assert len(set(map(tuple, outputs))) == 3

    resumed, _ = tiny.generate([PROMPTS[0] + outputs[1][:4]], 6, choices[1])

    assert resumed == [outputs[1][4:]]


def test_a_bias_can_force_and_forbid(tiny) -> None:
    forced, _ = tiny.generate([PROMPTS[0]], 5, params(logit_bias={33: 100.0}))
    assert forced == [[33] * 5]

    free, _ = tiny.generate([PROMPTS[0]], 1, params(temperature=0.0))
    other, _ = tiny.generate([PROMPTS[0]], 1, params(temperature=0.0, logit_bias={free[0][0]: -100.0}))

    assert other != free


def test_tokens_that_the_model_does_not_have_are_passed_over(tiny) -> None:
    odd = params(
        temperature=0.0, logit_bias={VOCAB: 100.0, -1: 100.0}, stop_token_ids=(VOCAB + 7,), min_tokens=2
    )

    assert (
        tiny.generate([PROMPTS[0]], 3, odd)[0] == tiny.generate([PROMPTS[0]], 3, params(temperature=0.0))[0]
    )


def test_no_end_before_the_least_number_of_tokens(tiny) -> None:
    eager = {"logit_bias": {EOS: 100.0, 12: 50.0}, "temperature": 0.0, "min_tokens": 3}

    stopped, ignoring, custom = (
        tiny.generate([PROMPTS[0]], 5, one)[0][0]
        for one in (
            params(**eager),
            params(**eager, ignore_eos=True),
            params(**eager, stop_token_ids=(12, EOS)),
        )
    )

    assert stopped == [12, 12, 12, EOS, EOS]
    assert ignoring == [EOS] * 5
    assert EOS not in custom[:3]
    assert 12 not in custom[:3]


def test_penalties_count_what_the_row_has_said(tiny) -> None:
    loud = {"logit_bias": {33: 20.0, 34: 19.0}, "temperature": 0.0}

    once, _ = tiny.generate([PROMPTS[0]], 4, params(**loud, presence_penalty=2.0))
    often, _ = tiny.generate([[1, 33]], 4, params(**loud, frequency_penalty=2.0))

    # 20, 19 -> 18, 19 -> 18, 17 -> 33 from then on
    assert once == [[33, 34, 33, 33]]
    # the prompt does not count: 20, 19 -> 18, 19 -> 18, 17 -> 16, 17
    assert often == [[33, 34, 33, 34]]


def test_penalties_go_on_elsewhere_as_they_would_have(tiny) -> None:
    penalized = params(seed=3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
    (whole,), _ = tiny.generate([PROMPTS[0]], 16, penalized)

    (rest,), _ = tiny.generate([PROMPTS[0] + whole[:7]], 9, penalized, num_said=7)
    (forgetful,), _ = tiny.generate([PROMPTS[0] + whole[:7]], 9, penalized)

    assert rest == whole[7:]
    assert forgetful != rest  # what was said before counts


def test_log_probabilities_are_given_to_those_who_asked(tiny) -> None:
    asked = [
        params(num_logprobs=2, temperature=0.0),
        params(),
        params(num_logprobs=0),
        params(num_logprobs=VOCAB),
    ]

    outputs, logprobs = tiny.generate(PROMPTS, 3, asked)

    assert logprobs[1] == [None] * 3
    for token_id, found in zip(outputs[0], logprobs[0], strict=True):
        assert found.top_token_ids[0] == token_id
        assert found.top_logprobs[0] == found.sampled
        assert len(found.top_logprobs) == 2
    assert all(found.top_token_ids == [] for found in logprobs[2])
    for found in logprobs[3]:
        assert sum(map(math.exp, found.top_logprobs)) == pytest.approx(1.0, abs=1e-4)
        assert found.top_logprobs == sorted(found.top_logprobs, reverse=True)


def test_log_probabilities_do_not_see_bias_or_temperature(tiny) -> None:
    plain = tiny.generate([PROMPTS[0]], 1, params(num_logprobs=3))[1]
    bent = tiny.generate([PROMPTS[0]], 1, params(num_logprobs=3, temperature=0.1, logit_bias={5: 50.0}))[1]

    assert plain[0][0].top_logprobs == bent[0][0].top_logprobs
