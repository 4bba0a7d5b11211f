"""Drives a rank with plans written by hand. As a program: one rank of a tensor-parallel group over gloo."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint.model_config import Experts, ModelConfig
from workers.checkpoint.source import ModelFiles
from workers.engine.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from workers.engine.request import ChoiceParams
from workers.model import tensor_parallel
from workers.model.cuda_rank import make_rank
from workers.model.rank import Rank
from workers.model.rank_config import RANK_ENVIRONMENT, RankConfig

GREEDY = ChoiceParams(max_tokens=64, temperature=0.0, ignore_eos=True)


class PlanDriver:
    """Rows with block tables in random order, moved through prefill and decode."""

    def __init__(self, rank: Rank, num_blocks: int, seed: int = 0) -> None:
        """Take over a loaded and allocated rank."""
        self.rank = rank
        self._block_size = rank.config.block_size
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._num_steps = 0

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        params: ChoiceParams | list[ChoiceParams] = GREEDY,
        chunk: int | None = None,
        shared: list[int] | None = None,
        first_row: int = 0,
        is_ahead: bool = False,
        num_said: int = 0,
    ) -> tuple[list[list[int]], list[list[TokenLogprobs | None]]]:
        """Return each prompt's next ``num_tokens`` tokens, and their log-probabilities.

        All prompts are prefilled together, in pieces of ``chunk`` tokens if given, then decoded together. ``shared``
        are full blocks, already computed, with which every prompt begins. With ``is_ahead`` each step is launched
        before the result of the one before it is collected. The last ``num_said`` tokens of a prompt are output.
        """
        all_params = params if isinstance(params, list) else [params] * len(prompts)
        rows = list(range(first_row, first_row + len(prompts)))
        tables = [list(shared or []) for _ in prompts]
        for table, prompt in zip(tables, prompts, strict=True):
            while len(table) * self._block_size < len(prompt) + num_tokens:
                table.append(self._free.pop())
        new_rows = [
            NewRow(row, prompt, len(prompt) - num_said, one)
            for row, prompt, one in zip(rows, prompts, all_params, strict=True)
        ]
        done = [len(shared or []) * self._block_size] * len(prompts)
        is_first = True
        outputs: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[TokenLogprobs | None]] = [[] for _ in prompts]
        pending: list[list[int]] = []

        def collect() -> None:
            result = self.rank.collect()
            sampled = pending.pop(0)
            found = result.logprobs or [None] * len(sampled)
            for index, token_id, one in zip(sampled, result.token_ids, found, strict=True):
                outputs[index].append(token_id)
                logprobs[index].append(one)

        while unfinished := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
            counts = [min(chunk or len(prompts[i]), len(prompts[i]) - done[i]) for i in unfinished]
            order = sorted(zip(counts, unfinished, strict=True))  # single tokens come first, as decodes would
            sampled = [i for count, i in order if done[i] + count == len(prompts[i])]
            self._launch(
                new_rows if is_first else [],
                [rows[i] for _, i in order],
                [done[i] for _, i in order],
                [count for count, _ in order],
                [done[i] + count == len(prompts[i]) for count, i in order],
                [tables[i] if is_first else [] for _, i in order],
            )
            pending.append(sampled)
            for count, i in order:
                done[i] += count
            is_first = False
            collect()
        everyone = list(range(len(prompts)))
        for step in range(num_tokens - 1):
            starts = [len(prompt) + step for prompt in prompts]
            self._launch([], rows, starts, [1] * len(rows), [True] * len(rows), [[] for _ in rows])
            pending.append(everyone)
            if not is_ahead or len(pending) > 1:
                collect()
        while pending:
            collect()
        for table in tables:
            self._free.extend(table[len(shared or []) :])
        return outputs, logprobs

    def compute_blocks(self, token_ids: list[int]) -> list[int]:
        """Prefill ``token_ids``, whole blocks of them, and return the blocks, which stay taken."""
        blocks = [self._free.pop() for _ in range(len(token_ids) // self._block_size)]
        row = NewRow(0, token_ids, len(token_ids), GREEDY)
        self._launch([row], [0], [0], [len(token_ids)], [False], [blocks])
        assert self.rank.collect().token_ids == []
        return blocks

    def collect_plan(self, plan: StepPlan) -> StepResult:
        """Run one plan to its result."""
        self.rank.launch(plan)
        return self.rank.collect()

    def _launch(
        self,
        new_rows: list[NewRow],
        rows: list[int],
        starts: list[int],
        num_tokens: list[int],
        samples: list[bool],
        new_block_ids: list[list[int]],
    ) -> None:
        self._num_steps += 1
        self.rank.launch(
            StepPlan(self._num_steps, new_rows, rows, starts, num_tokens, samples, new_block_ids)
        )


def read_fields(fields: dict[str, Any]) -> ModelConfig:
    """Undo ``dataclasses.asdict`` and JSON."""
    experts = fields.get("experts")
    return ModelConfig(**fields | {"experts": Experts(**experts) if experts is not None else None})


def run_group(
    spec: dict[str, Any], tp_rank: int = 0, tp_size: int = 1, rendezvous: str | None = None
) -> list[list[int]]:
    """Continue prompts as one rank of a group, and return the tokens.

    The spec holds ``prompts`` and ``num_tokens``, and either ``model`` (a path) or ``model_config`` (fields, for random
    weights); it may hold ``rank`` (more fields of the rank's config), ``params`` (a list) and ``chunk``.
    """
    params = [ChoiceParams(**one) for one in spec["params"]] if "params" in spec else GREEDY
    config = RankConfig(
        files=ModelFiles(Path(spec["model"]), "demo") if "model" in spec else None,
        load_format="auto" if "model" in spec else "dummy",
        model_config=read_fields(spec["model_config"]) if "model_config" in spec else None,
        max_model_len=256,
        num_threads=1,
        tp_rank=tp_rank,
        tp_size=tp_size,
        rendezvous=rendezvous,
        **spec.get("rank", {}),
    )
    rank = make_rank(config)
    rank.load()
    rank.allocate(200)
    rank.warm_up()
    driver = PlanDriver(rank, 200)
    outputs, _ = driver.generate(spec["prompts"], spec["num_tokens"], params, spec.get("chunk"))
    rank.close()
    return outputs


def main(spec_json: str, tp_rank: str, tp_size: str, rendezvous: str) -> None:
    """Be one rank as ``spec_json`` says, and print the tokens as JSON.

    The spec may also hold ``overlapped_tokens``: steps of so many are computed in parts.
    """
    os.environ.update(RANK_ENVIRONMENT)
    torch.set_num_threads(1)
    spec = json.loads(spec_json)
    if "overlapped_tokens" in spec:
        tensor_parallel._OVERLAPPED_TOKENS = spec["overlapped_tokens"]
    print(json.dumps(run_group(spec, int(tp_rank), int(tp_size), rendezvous if tp_size != "1" else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
