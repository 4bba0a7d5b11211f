"""What is damaged in one rank's host memory is computed again on all: tokens stay the same, and it is counted."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from deploy.offline import executor
from shoal import LLM, SamplingParams

SHAPE = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
PROMPTS = [[7 + number] * (10 + number) for number in range(6)]
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)


def make_llm(**options: Any) -> LLM:
    return LLM(
        str(SHAPE), load_format="dummy", dtype="float32", skip_tokenizer_init=True, cpu_threads=1, max_num_seqs=8,
        max_model_len=128, enable_prefix_caching=False, **options,
    )  # fmt: skip


def tokens(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.timeout(300)
def test_blocks_damaged_on_the_second_rank_are_all_found_and_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = make_llm()
    expected = tokens(alone)
    alone.close()
    # The process of a rank finds the module by its name.
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(executor, "_run_rank", importlib.import_module("damaging_rank").run_damaged)

    llm = make_llm(
        tensor_parallel_size=2, num_gpu_blocks_override=8, preemption_mode="swap", swap_space=0.05, kv_checksum=True
    )  # fmt: skip
    try:
        assert tokens(llm) == expected
        load = llm.load
    finally:
        llm.close()

    print(f"{load.num_corrupt_blocks} of {load.num_blocks_swapped_in} blocks were damaged")
    assert load.num_corrupt_blocks == load.num_blocks_swapped_in >= 6
