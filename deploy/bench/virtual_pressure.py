"""Oversubscribed memory in virtual time: the real engine over a cost model, so that every choice can be compared.

``python -m deploy.bench.virtual_pressure OUT.json`` runs all cases.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from deploy.bench.report import environment, write_result
from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel, StepWork
from workers.engine.engine import Engine
from workers.engine.plan import StepPlan, StepResult
from workers.engine.request import ChoiceParams, EngineRequest

MODELS = {
    "8B on an H200": CostModel(0.0039, 4e-6, 22e-6, 3.2e-8, 9e-10, copy_base_s=24e-6),
    "0.6B on an H200": CostModel(0.0008, 2e-6, 2.5e-6, 1.4e-8, 4e-10, copy_base_s=24e-6),
    "135M on a CPU": CostModel(0.0437, 3.25e-3, 2.3e-3, 2e-6, 0.0, copy_base_s=1e-5),
}
"""The first by the figures in deploy/docs; the second estimated: its blocks are nearly as large, computing is ten times
as cheap beside copying; the third by ``results/cpu-narrow-weights-2026-11-30.json``, float32 on one thread."""
COPIES_S = {
    "8B on an H200": (40e-6, 150e-6, 300e-6, 2e-3),
    "0.6B on an H200": (37e-6, 60e-6, 150e-6),
    "135M on a CPU": (0.15e-3, 20e-3, 40e-3, 80e-3, 200e-3),
}
"""Of a block: as the link or the memory copies it, and slower."""
POOLS = (0.95, 1.0, 1.05)
"""Shares of the memory that a case is run with: whom a block's lack meets is chance, and moves one run by 4 %."""
NUM_AT_ONCE = 32
NUM_TOKENS = 512
"""Of a request."""
MIXES = {"long-in": [(448, 64)], "long-out": [(64, 448)], "mixed": [(448, 64), (64, 448)]}
Mode = Literal["auto", "swap", "recompute"]
MODES: tuple[Mode, ...] = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """One mix in one mode."""

    mix: str
    pressure: float
    copy_block_ms: float
    mode: str
    output_tokens_per_s: float
    num_swapped: int
    num_recomputed: int


class VirtualRank:
    """Steps take what the cost model says; copies take their time beside them, one way each at a time."""

    def __init__(self, cost: CostModel) -> None:
        self.now_s = 0.0
        self._cost = cost
        self._steps: deque[tuple[StepPlan, float, float]] = deque()
        self._free_s = 0.0
        self._link_free_s = [0.0, 0.0]
        self._copies: deque[tuple[int, float, int, float]] = deque()

    def launch(self, plan: StepPlan) -> None:
        start_s = max(self.now_s, self._free_s)
        num_decodes = sum(count == 1 for count in plan.num_tokens)
        chunks = list(zip(plan.starts, plan.num_tokens, strict=True))[num_decodes:]
        work = StepWork(
            num_decodes,
            sum(count for _, count in chunks),
            sum(plan.starts[:num_decodes]),
            sum(count * (start + count // 2) for start, count in chunks),
        )
        duration_s = self._cost.step_s(
            work.num_decodes, work.num_prefill_tokens, work.num_context_tokens, work.num_attended
        )
        self._free_s = start_s + (duration_s if plan.rows else 0.0)
        for way, copies in enumerate((plan.swap_out, plan.swap_in)):
            if copies:
                copy_s = self._cost.copy_s(len(copies))
                self._link_free_s[way] = max(start_s, self._link_free_s[way]) + copy_s
                self._copies.append((plan.step_id, self._link_free_s[way], len(copies), copy_s))
        self._steps.append((plan, start_s, self._free_s))

    def collect(self) -> StepResult:
        plan, start_s, end_s = self._steps.popleft()
        self.now_s = max(self.now_s, end_s)
        if plan.awaits_copies:
            self.now_s = max([self.now_s, *(due_s for _, due_s, _, _ in self._copies)])
        copied, num_blocks, copied_s = plan.step_id, 0, 0.0
        pending: deque[tuple[int, float, int, float]] = deque()
        for step_id, due_s, count, copy_s in self._copies:
            if due_s <= self.now_s:
                num_blocks, copied_s = num_blocks + count, copied_s + copy_s
            else:
                pending.append((step_id, due_s, count, copy_s))
                copied = min(copied, step_id - 1)
        self._copies = pending
        return StepResult(
            plan.step_id, [5] * sum(plan.samples), elapsed_s=end_s - start_s,
            copied=copied, num_copied_blocks=num_blocks, copied_s=copied_s,
        )  # fmt: skip


def run(
    mix: str, mode: Mode, copy_block_s: float, pressure: float, model: CostModel, has_host: bool = True
) -> VirtualRun:
    """64 requests, half of them at once, on memory for ``1 / pressure`` of those."""
    cost = replace(model, copy_block_s=copy_block_s)
    config = EngineConfig(
        max_model_len=NUM_TOKENS,
        num_blocks=int(NUM_AT_ONCE * NUM_TOKENS / 16 / pressure),
        max_num_seqs=NUM_AT_ONCE,
        max_num_batched_tokens=2048,
        num_host_blocks=4000 if has_host else 0,
        preemption_mode=mode,
        enable_prefix_caching=False,
        run_ahead=1,
    )
    engine, rank = Engine(config, cost), VirtualRank(cost)
    lengths = MIXES[mix]
    num_tokens = 0
    for number in range(2 * NUM_AT_ONCE):
        num_in, num_out = lengths[number % len(lengths)]
        num_tokens += num_out
        params = ChoiceParams(max_tokens=num_out, ignore_eos=True)
        engine.add(EngineRequest(str(number), [number] * num_in, params), 0.0)
    while engine.has_work:
        while (plan := engine.plan(rank.now_s)) is not None:
            rank.launch(plan)
        engine.apply(rank.collect(), rank.now_s)
    load = engine.load()
    return VirtualRun(
        mix,
        pressure,
        1e3 * copy_block_s,
        mode if has_host else "no host memory",
        num_tokens / rank.now_s,
        load.num_swap_preemptions,
        load.num_preemptions - load.num_swap_preemptions,
    )


def run_pools(
    mix: str, mode: Mode, copy_block_s: float, pressure: float, model: CostModel, has_host: bool = True
) -> VirtualRun:
    """The mean of runs with a little less and a little more memory; counts are of all of them."""
    runs = [run(mix, mode, copy_block_s, pressure / share, model, has_host) for share in POOLS]
    return replace(
        runs[0],
        pressure=pressure,
        output_tokens_per_s=round(sum(one.output_tokens_per_s for one in runs) / len(runs), 1),
        num_swapped=sum(one.num_swapped for one in runs),
        num_recomputed=sum(one.num_recomputed for one in runs),
    )


def run_all(name: str) -> list[VirtualRun]:
    """Every mix, pressure and rate of copies in every mode, and without host memory."""
    model, copies_s, found = MODELS[name], COPIES_S[name], []
    for mix in MIXES:
        for pressure in (2.0, 4.0):
            found.append(run_pools(mix, "recompute", copies_s[0], pressure, model, has_host=False))
            found += [run_pools(mix, mode, one, pressure, model) for one in copies_s for mode in MODES]
    return found


if __name__ == "__main__":
    write_result(
        Path(sys.argv[1]),
        {
            "bench": "oversubscription in virtual time: 64 requests of 512 tokens, 32 at once",
            "environment": environment(),
            "cost models": {name: str(model) for name, model in MODELS.items()},
            "runs": {name: [asdict(one) for one in run_all(name)] for name in MODELS},
        },
    )
