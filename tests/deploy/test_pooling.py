"""Vectors of prompts: transformers' last hidden states, whole or in chunks, alone or among decoding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import LLM, SamplingParams

PROMPTS = [[3, 5, 7, 11, 13], [2], list(range(1, 41)), [9] * 17]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of the Llama family on disk, and the same in transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def make_llm(tiny: tuple[Path, Any]) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        options = {"cpu_threads": 1, "skip_tokenizer_init": True, "num_gpu_blocks_override": 32, **options}
        made.append(LLM(str(tiny[0]), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def expected(model: Any, pooling: str) -> list[np.ndarray]:
    with torch.inference_mode():
        hidden = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return [(one.mean(0) if pooling == "mean" else one[-1]).numpy() for one in hidden]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16}], ids=["whole prompts", "chunked prefill"]
)
def test_a_vector_is_of_transformers_hidden_states(
    tiny: tuple[Path, Any], make_llm: Callable[..., LLM], pooling: str, options: dict[str, Any]
) -> None:
    llm = make_llm(**options)

    for _ in range(2):  # the second time blocks are found in the cache
        outputs = llm.encode(PROMPTS, pooling=pooling, use_tqdm=False)

        for output, wanted in zip(outputs, expected(tiny[1], pooling), strict=True):
            np.testing.assert_allclose(output.outputs.data.numpy(), wanted, atol=2e-5)


def test_embeddings_have_length_one(make_llm: Callable[..., LLM]) -> None:
    outputs = make_llm().embed(PROMPTS, use_tqdm=False)

    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        assert sum(value**2 for value in output.outputs.embedding) == pytest.approx(1)
        assert output.outputs.hidden_size == 64


def test_generation_goes_on_as_before_beside_and_after_pooling(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    before = llm.generate(PROMPTS, params, use_tqdm=False)

    llm.encode(PROMPTS, use_tqdm=False)
    after = llm.generate(PROMPTS, params, use_tqdm=False)

    assert [one.outputs[0].token_ids for one in before] == [one.outputs[0].token_ids for one in after]


@pytest.mark.timeout(300)
def test_two_ranks_give_the_same_vectors(tiny: tuple[Path, Any], make_llm: Callable[..., LLM]) -> None:
    outputs = make_llm(tensor_parallel_size=2).encode(PROMPTS, use_tqdm=False)

    for output, wanted in zip(outputs, expected(tiny[1], "mean"), strict=True):
        np.testing.assert_allclose(output.outputs.data.numpy(), wanted, atol=2e-5)
