"""Weights of 8 and 4 bits on a CPU: near the full ones, and a row gives the same whoever stands beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization, choose_quantization
from workers.checkpoint.source import ModelFiles
from workers.engine.plan import NewRow, StepPlan, TokenLogprobs
from workers.engine.request import ChoiceParams
from workers.model.quantized.linears import CodedLinear, ScaledLinear
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

VOCAB = 67
CONFIG = ModelConfig("llama", 64, 128, 2, 4, 2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=256)
DUMMY = RankConfig(load_format="dummy", model_config=CONFIG, num_threads=1)
PROMPTS = [[(5 * i + row) % VOCAB for i in range(length)] for row, length in enumerate((9, 1, 40, 17))]


def logprobs(rank: Rank, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of the token after each prompt: all prompts in one step, then their tokens 3, 3, ... in three steps more."""
    params = ChoiceParams(max_tokens=4, temperature=0.0, num_logprobs=VOCAB)
    rows = [NewRow(i, ids, len(ids), params) for i, ids in enumerate(prompts)]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    lengths = [len(prompts[i]) for i in order]
    tables = [list(range(4 * i, 4 * i + 4)) for i in order]
    zeros = [0] * len(order)
    rank.launch(StepPlan(0, rows, order, zeros, lengths, [True] * len(order), tables))
    found = [rank.collect().logprobs]
    for step in (1, 2, 3):
        starts = [length + step - 1 for length in lengths]
        ones = [1] * len(order)
        rank.launch(StepPlan(step, [], order, starts, ones, [True] * len(order), [[]] * len(order)))
        found.append(rank.collect().logprobs)
    return [
        torch.cat([_in_order(one[order.index(i)]) for one in found if one is not None])
        for i in range(len(prompts))
    ]


def _in_order(told: TokenLogprobs) -> torch.Tensor:
    by_token = torch.empty(VOCAB)
    by_token[list(told.top_token_ids)] = torch.tensor(told.top_logprobs)
    return by_token


def loaded(**fields: object) -> Rank:
    rank = Rank(replace(DUMMY, **fields))
    rank.load()
    rank.allocate(32)
    rank.warm_up()
    return rank


@pytest.mark.parametrize(("how", "kind"), [("int8", ScaledLinear), ("int4", CodedLinear)])
def test_a_row_gives_the_same_bits_whoever_stands_beside_it(how: str, kind: type) -> None:
    rank = loaded(quantization=how)
    assert isinstance(rank._decoder.linears()[0], kind)

    together = logprobs(rank, PROMPTS)

    for prompt, beside in zip(PROMPTS, together, strict=True):
        (alone,) = logprobs(rank, [prompt])
        assert torch.equal(alone, beside)


@pytest.mark.parametrize(("how", "worst"), [("int8", 0.15), ("int4", 1.0)])
def test_narrow_weights_answer_nearly_as_full_ones_do(how: str, worst: float) -> None:
    for got, want in zip(
        logprobs(loaded(quantization=how), PROMPTS), logprobs(loaded(), PROMPTS), strict=True
    ):
        assert 0 < (got[:VOCAB] - want[:VOCAB]).abs().max() < worst * want[:VOCAB].std()


def test_a_gguf_file_is_quantized_anew_if_asked() -> None:
    stored = Quantization("gguf")

    assert choose_quantization(stored, "int8") == Quantization("int8", is_online=True)
    assert choose_quantization(stored, None) == stored


@pytest.mark.slow
def test_four_bits_of_the_demo_model_are_its_own(demo_model: ModelFiles, goldens) -> None:
    # The file's Q4_1 has the same groups of 32 with a scale and an offset: only activations are rounded.
    rank = Rank(RankConfig(files=demo_model, quantization="int4", max_model_len=256, num_threads=2))
    rank.load()
    rank.allocate(64)
    case = goldens[0]
    row = NewRow(
        0,
        case["prompt_token_ids"],
        len(case["prompt_token_ids"]),
        ChoiceParams(max_tokens=1, temperature=0.0),
    )

    rank.launch(StepPlan(0, [row], [0], [0], [len(row.token_ids)], [True], [list(range(8))]))

    assert rank.collect().token_ids[0] == case["output_token_ids"][0]
