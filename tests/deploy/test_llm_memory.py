"""Offline generation with less KV memory than its prompts need."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deploy.bench.pressure import MODES, PressureLoad, PressureRun, measure_host_hit, measure_pressure
from deploy.offline.llm import LLM
from deploy.offline.sampling_params import SamplingParams
from workers.engine.errors import UserError

TINY = str(Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny")


def make_llm(**fields: object) -> LLM:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "cpu_threads": 1}
    return LLM(TINY, **{**settings, **fields})


def test_prompts_beyond_the_memory_yield_what_they_would_have_with_enough() -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [[100 + 3 * number + i for i in range(30)] for number in range(6)]
    outputs = []
    for fields in ({}, {"num_gpu_blocks_override": 12, "swap_space": 0.01, "preemption_mode": "swap"}):
        llm = make_llm(max_model_len=128, **fields)
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        load = llm.load
        llm.close()

    assert outputs[0] == outputs[1]
    assert load.num_swap_preemptions > 0


def test_the_last_tokens_wait_for_no_copies_to_the_host() -> None:
    """A copy takes minutes here: whoever waits for one sleeps, which is refused."""
    llm = make_llm(max_model_len=128, num_gpu_blocks_override=20, swap_space=0.01)
    copies = llm._loop.executor.rank._copies  # type: ignore[attr-defined]
    copies._bytes_per_s, copies._sleep = 1.0, lambda _: pytest.fail("generate waits for copies")
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)

    for number in range(6):
        llm.generate([[100 + 90 * number + i for i in range(90)]], params, use_tqdm=False)

    assert llm._loop.engine.has_work, "copies are under way"
    llm.close()


def test_a_context_that_the_blocks_do_not_hold_is_refused_or_said_to_be_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        UserError, match=r"blocks-override 8 holds 128 tokens, .* --max-model-len 1000: .* 63 blocks"
    ):
        make_llm(max_model_len=1000, num_gpu_blocks_override=8)

    with caplog.at_level(logging.WARNING, logger="shoal.engine"):
        llm = make_llm(num_gpu_blocks_override=8)

    assert llm.max_model_len == 128
    assert "the context is cut from 4096 to 128 tokens" in caplog.text
    llm.close()


def test_prompts_are_served_by_their_priority() -> None:
    llm = make_llm(max_model_len=128, max_num_seqs=1, scheduling_policy="priority")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    ended: list[str] = []
    take = llm._loop._take
    llm._loop._take = lambda output: ended.append(output.request_id) or take(output)  # type: ignore

    llm.generate([[1, 2], [3, 4], [5, 6]], params, use_tqdm=False, priority=[2, 0, 1])

    assert list(dict.fromkeys(ended)) == ["1-0", "2-0", "0-0"]
    with pytest.raises(UserError, match="2 priorities for 1 prompts"):
        llm.generate([[1, 2]], params, use_tqdm=False, priority=[2, 0])
    llm.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tensor_parallel_size": 64}, "--tensor-parallel-size is 64, .* cannot share"),
        ({"num_gpu_blocks_override": 10**12}, "more than this machine's"),
        ({"swap_space": 1e9}, r"--swap-space 1,000,000,000 \(GiB\)"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size is True"),
        ({"swap_space": True}, "--swap-space is True"),
        ({"load_format": "gguf"}, "--load-format is gguf"),
    ],
)
def test_what_cannot_work_is_said_before_a_rank_starts(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_llm(**fields)


def test_the_pressure_benchmark_counts_what_gave_way() -> None:
    llm = make_llm(max_model_len=128, max_num_seqs=8, swap_space=0.02, copy_gib_per_s=1.0)

    told: list[PressureRun] = []
    runs = measure_pressure(llm, PressureLoad(8, 8, 96, 2.0), mixes=("long-out",), told=told.append)

    assert told == runs
    assert [run.mode for run in runs] == list(MODES)
    by_mode = {run.mode: run for run in runs}
    assert by_mode["swap"].num_swapped == by_mode["swap"].num_preemptions > 0
    assert by_mode["recompute"].num_swapped == by_mode["no swap space"].num_swapped == 0
    assert by_mode["recompute"].num_recomputed > 0
    assert all(run.most_preemptions <= 3 for run in runs)
    llm.close()


def test_the_benchmark_of_host_hits_finds_the_prompt_there() -> None:
    llm = make_llm(max_model_len=300, swap_space=0.05)

    hit = measure_host_hit(llm, 256, repeats=1, mode="swap")

    assert hit.host_tokens == 240
    llm.close()


def test_a_prompt_that_host_memory_cannot_have_is_no_hit() -> None:
    llm = make_llm(max_model_len=300, swap_space=17 * 65536 / 2**30)
    without = make_llm(max_model_len=300)

    with pytest.raises(UserError, match=r"no token of a prompt of 256 came from host memory, .* 17 blocks"):
        measure_host_hit(llm, 256, repeats=1, mode="recompute")
    with pytest.raises(
        UserError, match=r"--swap-space holds 17 blocks .* 18 are needed: give .* GiB or more"
    ):
        measure_host_hit(llm, 280)
    with pytest.raises(UserError, match=r"--prompt-len is 16, .* give 17 or more"):
        measure_host_hit(llm, 16)
    with pytest.raises(UserError, match="--swap-space holds 0 blocks"):
        measure_pressure(without, PressureLoad(8, 8, 96, 2.0))
    llm.close()
    without.close()
