"""Masks, allowed tokens and bad words on a rank; masks that come late change nothing but when a row is sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from workers.checkpoint.model_config import ModelConfig
from workers.engine.config import EngineConfig
from workers.engine.constraint import Matcher
from workers.engine.engine import Engine
from workers.engine.plan import TokenMask
from workers.engine.request import ChoiceParams, EngineRequest
from workers.model.deferred_rows import packed_masks

VOCAB = 50
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
    eos_token_ids=(7,),
)


@pytest.fixture
def tiny_rank(make_rank):
    """A tiny random model."""
    return make_rank(load_format="dummy", model_config=CONFIG, seed=3)


def bits(*token_ids: int) -> bytes:
    """A mask, longer than the vocabulary as those of libraries are."""
    return sum(1 << token_id for token_id in token_ids).to_bytes(12, "little")


class EveryOther:
    """A grammar: even and odd tokens in turn."""

    is_complete = False

    def __init__(self) -> None:
        self.num_taken = 0

    def prepare(self, others: Sequence[Matcher]) -> None:
        pass

    def mask(self) -> bytes:
        return bits(*range(self.num_taken % 2, VOCAB, 2))

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == self.num_taken % 2
        self.num_taken += 1


def generate(rank, requests: list[EngineRequest], run_ahead: int) -> dict[str, list[int]]:
    """Run an engine over the rank; the tokens of each request."""
    config = EngineConfig(max_model_len=128, num_blocks=64, eos_token_ids=(7,), run_ahead=run_ahead)
    engine = Engine(config)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request, 0.0, EveryOther() if request.params.grammar else None)
    while engine.has_work:
        while (plan := engine.plan(0.0)) is not None:
            rank.launch(plan)
        assert rank.ready()
        for output in engine.apply(rank.collect(), 0.0):
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.mark.parametrize("own", [range(40), range(16, 40)], ids=["whole vocabulary", "a share of it"])
def test_masks_of_all_rows_lie_side_by_side(own: range) -> None:
    masks = {0: bits(3, 17), 2: b"\x01"}  # the second one ends early: what lies beyond is forbidden

    packed = packed_masks(masks, 3, own)

    allowed = [
        [token_id for token_id in own if packed[row, (token_id - own.start) // 8] >> token_id % 8 & 1]
        for row in range(3)
    ]
    assert allowed == [[i for i in (3, 17) if i in own], list(own), [i for i in (0,) if i in own]]


def test_a_row_takes_only_what_its_mask_allows(tiny_rank, plan_driver) -> None:
    driver = plan_driver.PlanDriver(tiny_rank, 64)
    rows = [plan_driver.NewRow(row, [1, 2], 2, ChoiceParams(max_tokens=9, seed=row)) for row in range(3)]

    masks = [TokenMask(0, bits(33)), TokenMask(2, bits(5, 49))]
    result = driver.collect_plan(
        plan_driver.StepPlan(0, rows, [0, 1, 2], [0] * 3, [2] * 3, [True] * 3, [[0], [1], [2]], masks=masks)
    )

    assert result.token_ids[0] == 33
    assert result.token_ids[2] in (5, 49)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_running_ahead_changes_no_token(tiny_rank, temperature: float) -> None:
    requests = [
        EngineRequest(
            name,
            [3, 4, 5],
            ChoiceParams(max_tokens=12, temperature=temperature, seed=1, ignore_eos=True, grammar=grammar),
        )
        for name, grammar in (("free", ""), ("bound", "every other"), ("too", "every other"))
    ]

    waiting = generate(tiny_rank, requests, 0)
    ahead = generate(tiny_rank, requests, 1)

    assert ahead == waiting
    assert [token_id % 2 for token_id in ahead["bound"]] == [0, 1] * 6
    assert ahead["bound"] != ahead["free"]


def test_only_allowed_tokens_are_sampled(tiny_rank, plan_driver) -> None:
    driver = plan_driver.PlanDriver(tiny_rank, 64)

    outputs, _ = driver.generate([[1, 2, 3]], 20, ChoiceParams(max_tokens=99, allowed_token_ids=(4, 44)))

    assert set(outputs[0]) == {4, 44}


def test_no_bad_word_is_completed(tiny_rank, plan_driver) -> None:
    driver = plan_driver.PlanDriver(tiny_rank, 64)
    words = ((11,), (10, 12), (12, 12, 10))
    wish = ChoiceParams(max_tokens=99, seed=5, allowed_token_ids=(10, 11, 12))

    free, _ = driver.generate([[12, 12]], 60, wish)
    clean, _ = driver.generate([[12, 12]] * 2, 60, [wish, replace(wish, bad_words=words)])

    def holds(output: list[int], word: tuple[int, ...]) -> bool:
        return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))

    assert all(holds(free[0], word) for word in words)
    assert not any(holds(clean[1], word) for word in words)
    assert clean[0] == free[0]  # a neighbour's words are not its own


def test_a_bad_word_may_be_any_tokens_at_all(tiny_rank, plan_driver) -> None:
    driver = plan_driver.PlanDriver(tiny_rank, 64)
    rng = random.Random(1)
    words = tuple(tuple(rng.randrange(VOCAB + 9) for _ in range(rng.randint(1, 5))) for _ in range(40))

    outputs, _ = driver.generate([[1]], 40, ChoiceParams(max_tokens=99, bad_words=words))

    said = outputs[0]
    assert not any(tuple(said[i : i + len(word)]) == word for word in words for i in range(len(said)))


def test_the_prompt_begins_no_bad_word(tiny_rank, plan_driver) -> None:
    driver = plan_driver.PlanDriver(tiny_rank, 64)
    wish = ChoiceParams(
        max_tokens=99, temperature=0.0, logit_bias={10: 100.0}, bad_words=((12, 10), (10, 10))
    )

    outputs, _ = driver.generate([[12]], 2, wish)

    assert outputs[0][0] == 10
    assert outputs[0][1] != 10
