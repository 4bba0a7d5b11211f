"""Offline generation: golden tokens of the demo model, whatever the engine does to get there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams, StructuredOutputsParams
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest, PromptTooLong

CASES = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_135m.json").read_text())["cases"]
PROMPTS = [case["prompt_token_ids"] for case in CASES]
EXPECTED = [case["output_token_ids"] for case in CASES]
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)

pytestmark = pytest.mark.timeout(300)


def make_llm(**options: Any) -> LLM:
    return LLM(**{"max_model_len": 512, "max_num_seqs": 32, "kv_cache_gib": 0.2, "cpu_threads": 1, **options})


@pytest.fixture(scope="module")
def llm(demo_model: ModelFiles) -> Iterator[LLM]:
    found = make_llm()
    yield found
    found.close()


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_prompt_by_itself_gives_the_golden_tokens(llm: LLM) -> None:
    assert tokens(llm, PROMPTS[:1]) == EXPECTED[:1]


def test_32_ragged_prompts_together_give_the_golden_tokens(llm: LLM) -> None:
    rounds = -(-32 // len(PROMPTS))

    assert tokens(llm, (PROMPTS * rounds)[:32]) == (EXPECTED * rounds)[:32]


def test_prompts_found_in_the_cache_give_the_golden_tokens(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    assert [output.outputs[0].token_ids for output in outputs] == EXPECTED
    assert max(output.num_cached_tokens for output in outputs) >= 96


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 16}, id="chunked prefill"),
        # Five prompts with their outputs need 35 blocks.
        pytest.param({"num_gpu_blocks_override": 20, "enable_prefix_caching": False}, id="preemption"),
        pytest.param(
            {
                "tensor_parallel_size": 2,
                "cpu_threads": 1,
                "num_gpu_blocks_override": 20,
                "enable_prefix_caching": False,
                "preemption_mode": "swap",
                "swap_space": 0.1,
            },
            id="two ranks that swap",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_golden_tokens_come_out_of(options: dict[str, Any], demo_model: ModelFiles) -> None:
    llm = make_llm(max_model_len=256, **options)
    try:
        assert tokens(llm, PROMPTS[:5]) == EXPECTED[:5]
        if "num_gpu_blocks_override" in options:
            assert llm.load.num_preemptions > 0
        if options.get("preemption_mode") == "swap":
            assert llm.load.num_swap_preemptions > 0
            assert llm.load.num_blocks_swapped_in > 0
            # The first of two ranks has two of three KV heads: its blocks are twice as large, and its memory decides.
            block_bytes = 30 * 2 * 2 * 16 * 64 * 4  # layers, K and V, heads, tokens, head size, float32
            assert llm.load.num_host_blocks == int(0.1 * 2**30) // block_bytes
    finally:
        llm.close()


def test_text_is_the_text_of_the_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None

    output = llm.generate(
        "The capital of France is", SamplingParams(max_tokens=12, temperature=0), use_tqdm=False
    )[0]

    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert " Paris" in output.outputs[0].text


def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, stop=["the"])

    output = llm.generate("Once upon a time there was a", params, use_tqdm=False)[0].outputs[0]

    assert (output.finish_reason, output.stop_reason) == ("stop", "the")
    assert "the" not in output.text
    assert llm.load.num_running == 0


def test_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=16, temperature=1.0, seed=5)

    first, second = (
        [choice.token_ids for choice in llm.generate("A story:", params, use_tqdm=False)[0].outputs]
        for _ in range(2)
    )

    assert first == second
    assert len({tuple(token_ids) for token_ids in first}) == 3


def test_a_sampled_token_has_its_rank_among_all(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=2, seed=1, logprobs=1, ignore_eos=True)

    output = llm.generate("A story:", params, use_tqdm=False)[0].outputs[0]

    assert output.logprobs is not None
    found = [
        candidates[token_id] for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True)
    ]
    best = [max(one.logprob for one in candidates.values()) for candidates in output.logprobs]
    assert [one.rank == 1 for one in found] == [
        one.logprob == top for one, top in zip(found, best, strict=True)
    ]
    assert max(one.rank for one in found) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [5, 49152]}, "allowed_token_ids"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(
    llm: LLM, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 49,152") as caught:
        llm.generate("Hi", SamplingParams(**fields), use_tqdm=False)

    assert caught.value.param == param


def test_text_that_is_no_unicode_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        llm.generate("\ud800", GREEDY, use_tqdm=False)


def test_a_prompts_own_tokens_are_scored(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=1, temperature=0, prompt_logprobs=2)

    scored = llm.generate("The capital of France is Paris", params, use_tqdm=False)[0]
    plain = llm.generate("The capital of France is Paris", SamplingParams(max_tokens=1), use_tqdm=False)[0]

    assert scored.prompt_logprobs is not None
    first, *others = scored.prompt_logprobs
    assert first is None
    for token_id, candidates in zip(scored.prompt_token_ids[1:], others, strict=True):
        assert token_id in candidates
        assert 2 <= len(candidates) <= 3
    paris = others[-1][scored.prompt_token_ids[-1]]
    assert (paris.rank, paris.decoded_token) == (1, " Paris")
    assert plain.prompt_logprobs is None


def test_logprobs_of_greedy_tokens_rank_first(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2)

    output = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]

    assert output.logprobs is not None
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        assert candidates[token_id].rank == 1
        assert len(candidates) == 2
    assert output.cumulative_logprob == pytest.approx(
        sum(one[token_id].logprob for token_id, one in zip(output.token_ids, output.logprobs, strict=True))
    )


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([], InvalidRequest, "no tokens"),
        ([1] * 600, PromptTooLong, "600 tokens, this model takes 512"),
        ([10**6], InvalidRequest, "1000000"),
        ({"text": "x"}, InvalidRequest, "'prompt' or 'prompt_token_ids'"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_left_behind(
    llm: LLM, prompt: Any, error: type[Exception], says: str
) -> None:
    good = {"prompt_token_ids": PROMPTS[0]}
    bad = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}

    with pytest.raises(error, match=says):
        llm.generate([good, bad], GREEDY, use_tqdm=False)

    assert (llm.load.num_running, llm.load.num_waiting) == (0, 0)
    assert tokens(llm, PROMPTS[:1]) == EXPECTED[:1]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: "x"}}, "logit_bias"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": -1}, "min_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"allowed_token_ids": "ab"}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"detokenize": "no"}, "detokenize"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {5: True}}, "logit_bias"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
        ({"logit_bias": {5: math.inf}}, "logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_bad_sampling_params_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**changes)

    assert caught.value.param == param


def test_output_has_the_form_that_is_asked_for(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    wishes = [
        StructuredOutputsParams(json={**schema, "additionalProperties": False}),
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(regex=r"[0-9]{3}"),
    ]
    params = [
        SamplingParams(max_tokens=24, temperature=1, seed=1, structured_outputs=wish) for wish in wishes
    ]

    texts = [one.outputs[0].text for one in llm.generate(["Answer: "] * 3, params, use_tqdm=False)]

    assert isinstance(json.loads(texts[0])["a"], int)
    assert texts[1] in ("yes", "no")
    assert texts[2].isdigit()
    assert len(texts[2]) == 3


def test_bad_words_and_forbidden_tokens_never_come(llm: LLM) -> None:
    prompt = "The capital of France is"
    plain, spared = llm.generate(
        prompt, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
    ) + llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0, bad_words=["Paris"]), use_tqdm=False)
    allowed = llm.generate(
        prompt,
        SamplingParams(max_tokens=4, temperature=1, seed=1, allowed_token_ids=[500, 600]),
        use_tqdm=False,
    )[0]

    assert "Paris" in plain.outputs[0].text
    assert "Paris" not in spared.outputs[0].text
    assert set(allowed.outputs[0].token_ids) <= {500, 600}
    assert plain.outputs[0].finished()


def test_a_long_prompt_may_be_cut_from_the_left(llm: LLM) -> None:
    output = llm.generate(
        {"prompt_token_ids": list(range(100, 800))},
        SamplingParams(max_tokens=1, truncate_prompt_tokens=5),
        use_tqdm=False,
    )[0]

    assert output.prompt_token_ids == list(range(795, 800))
