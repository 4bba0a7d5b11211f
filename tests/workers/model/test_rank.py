"""A rank's limits: what it refuses, how much memory it takes, what is left where no compiler or oneDNN is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workers.checkpoint.model_config import ModelConfig
from workers.engine.errors import UserError
from workers.model.device import choose_dtype
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

CONFIG = ModelConfig("llama", 64, 96, 2, 4, 2, head_dim=16, vocab_size=50, max_position_embeddings=256)
DUMMY = RankConfig(load_format="dummy", model_config=CONFIG, num_threads=1)


def test_a_context_longer_than_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"257.*256"):
        Rank(replace(DUMMY, max_model_len=257))


def test_a_rank_needs_a_model() -> None:
    with pytest.raises(UserError, match="model"):
        Rank(RankConfig(load_format="dummy"))
    with pytest.raises(UserError, match="'auto' needs a model"):
        Rank(RankConfig(model_config=CONFIG)).load()


def test_blocks_fill_the_memory_given() -> None:
    rank = Rank(replace(DUMMY, kv_cache_bytes=1_000_000))
    rank.load()

    block_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, key and value, heads, tokens, head size, float32
    assert rank.max_num_blocks() == 1_000_000 // block_bytes


def test_memory_for_less_than_one_full_request_is_refused() -> None:
    rank = Rank(replace(DUMMY, kv_cache_bytes=100_000))
    rank.load()

    with pytest.raises(UserError, match=r"192 tokens.*256: max_model_len 192 or kv_cache_gib 0.01 would"):
        rank.max_num_blocks()


@pytest.mark.parametrize("change", [{"max_model_len": 192}, {"kv_cache_bytes": 131_072}])
def test_the_ways_out_of_too_little_memory_lead_out(change: dict[str, int]) -> None:
    rank = Rank(replace(DUMMY, **{"kv_cache_bytes": 100_000, **change}))
    rank.load()

    assert rank.max_num_blocks() * 16 >= rank.max_model_len


def test_memory_for_nothing_is_refused_with_what_would_do() -> None:
    rank = Rank(replace(DUMMY, kv_cache_bytes=10))
    rank.load()

    with pytest.raises(UserError, match=r"0 tokens, one request may need 256: kv_cache_gib 0.01 would do"):
        rank.max_num_blocks()


def test_progress_goes_from_the_first_layer_to_one() -> None:
    shares: list[float] = []

    Rank(DUMMY).load(shares.append)

    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == 3


def test_ready_means_that_a_plan_waits(make_rank, plan_driver) -> None:
    rank = make_rank(load_format="dummy", model_config=CONFIG)
    assert not rank.ready()

    row = plan_driver.NewRow(0, [1, 2], 2, plan_driver.GREEDY)
    rank.launch(plan_driver.StepPlan(5, [row], [0], [0], [2], [True], [[3]]))

    assert rank.ready()
    result = rank.collect()
    assert result.step_id == 5
    assert result.elapsed_s > 0
    assert not rank.ready()
    rank.close()
    rank.close()


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "flags", "dtype"),
    [
        ("auto", "bfloat16", "cpu", {"avx512f", "avx512_bf16"}, torch.float32),
        ("auto", "bfloat16", "cpu", {"amx_bf16"}, torch.bfloat16),
        ("auto", "float32", "cpu", {"amx_bf16"}, torch.float32),
        ("auto", "float32", "cuda", set(), torch.bfloat16),
        ("auto", "float16", "cuda", set(), torch.float16),
        ("float32", "bfloat16", "cuda", set(), torch.float32),
        ("bfloat16", "float32", "cpu", {"avx512_bf16"}, torch.bfloat16),
    ],
)
def test_the_dtype_is_one_that_the_device_is_fast_in(
    wanted: str, stored: str, device: str, flags: set[str], dtype: torch.dtype
) -> None:
    assert choose_dtype(wanted, stored, torch.device(device), frozenset(flags)) == dtype


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "int3"])
def test_arithmetic_that_a_cpu_does_not_have_is_refused(wanted: str) -> None:
    with pytest.raises(UserError):
        choose_dtype(wanted, "bfloat16", torch.device("cpu"), frozenset({"avx2"}))


def test_torch_kernels_stand_in_where_nothing_can_be_compiled(
    make_rank, plan_driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kernels.native

    prompts = [[1, 2, 3], [4] * 20]
    compiled = plan_driver.PlanDriver(make_rank(load_format="dummy", model_config=CONFIG), 64).generate(
        prompts, 8
    )[0]
    kernels.native.native_kernels.cache_clear()
    monkeypatch.setattr(kernels.native, "_SOURCES", (Path(__file__),))  # not C

    plain = plan_driver.PlanDriver(make_rank(load_format="dummy", model_config=CONFIG), 64).generate(
        prompts, 8
    )[0]

    assert kernels.native.native_kernels() is None
    kernels.native.native_kernels.cache_clear()
    assert plain == compiled
