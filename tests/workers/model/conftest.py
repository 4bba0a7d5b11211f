"""Fixtures of the rank's tests: the demo model loaded once, golden tokens, a driver of plans."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workers.checkpoint.source import ModelFiles
from workers.engine.plan import NewRow, StepPlan
from workers.engine.request import ChoiceParams
from workers.model import cuda_rank
from workers.model.rank import Rank
from workers.model.rank_config import RankConfig

NUM_BLOCKS = 800
GOLDENS_PATH = Path(__file__).parents[2] / "goldens" / "smollm2_135m.json"


@pytest.fixture(scope="session")
def plan_driver() -> ModuleType:
    """The module ``plan_driver.py``, which tests run as a program as well."""
    return module_beside("plan_driver")


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks`` of ``rank_processes.py``; the program is named by its file, beside this one."""
    run = module_beside("rank_processes").run_ranks
    return lambda program, *arguments, **options: run(
        Path(__file__).with_name(program), *arguments, **options
    )


def module_beside(name: str) -> ModuleType:
    """Load a module that lies beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def goldens() -> list[dict[str, list[int]]]:
    """Prompts and their greedy continuations by transformers in float32."""
    return json.loads(GOLDENS_PATH.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def all_goldens(goldens) -> list[dict[str, list[int]]]:
    """The same with more prompts, for devices faster than a CPU."""
    path = GOLDENS_PATH.with_stem(GOLDENS_PATH.stem + "_more")
    return goldens + json.loads(path.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def demo_rank(demo_model: ModelFiles) -> Rank:
    """The demo model on one thread."""
    rank = Rank(RankConfig(files=demo_model, max_model_len=1024, num_threads=1))
    rank.load()
    rank.allocate(NUM_BLOCKS)
    rank.warm_up()
    return rank


@pytest.fixture
def driver(demo_rank: Rank, plan_driver: ModuleType) -> object:
    """Drives the demo model; blocks in random order."""
    return plan_driver.PlanDriver(demo_rank, NUM_BLOCKS)


@pytest.fixture
def make_rank() -> Callable[..., Rank]:
    """Build a loaded rank from the fields of its config."""

    def make(num_blocks: int = 64, num_host_blocks: int = 0, **fields: object) -> Rank:
        rank = cuda_rank.make_rank(RankConfig(**{"num_threads": 1, **fields}))
        rank.load()
        rank.allocate(num_blocks, num_host_blocks)
        rank.warm_up()
        return rank

    return make


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Leave the machine's other cores to others."""
    torch.set_num_threads(1)


@pytest.fixture
def ragged_logprobs() -> Callable[[Rank, list[list[int]], int], list[torch.Tensor]]:
    """Compute prompts side by side, so many tokens of each a step; give what follows each."""
    return _ragged_logprobs


def _ragged_logprobs(rank: Rank, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Next token's log-probabilities of all prompts, computed side by side, ``chunk`` tokens a step."""
    vocab = rank.model_config.vocab_size
    params = ChoiceParams(max_tokens=1, temperature=0.0, num_logprobs=vocab)
    rows = [NewRow(i, ids, len(ids), params) for i, ids in enumerate(prompts)]
    blocks = [list(range(8 * i, 8 * i + -(-len(ids) // 16))) for i, ids in enumerate(prompts)]
    done, found = [0] * len(prompts), [torch.empty(vocab) for _ in prompts]
    step = 0
    while any(start < len(ids) for start, ids in zip(done, prompts, strict=True)):
        left = {i: min(chunk, len(ids) - done[i]) for i, ids in enumerate(prompts) if done[i] < len(ids)}
        order = sorted(left, key=lambda i: left[i])  # rows of one token come first
        samples = [done[i] + left[i] == len(prompts[i]) for i in order]
        tables = [blocks[i] if step == 0 else [] for i in order]
        rank.launch(
            StepPlan(
                step,
                rows if step == 0 else [],
                order,
                [done[i] for i in order],
                [left[i] for i in order],
                samples,
                tables,
            )
        )
        told = iter(rank.collect().logprobs or [])
        for i, sampled in zip(order, samples, strict=True):
            done[i] += left[i]
            if sampled:
                one = next(told)
                found[i][one.top_token_ids] = torch.tensor(one.top_logprobs)
        step += 1
    return found
