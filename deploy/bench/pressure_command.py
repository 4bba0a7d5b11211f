"""``shoal bench throughput --kv-pressure``: what to do when requests need more KV memory than there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.bench.pressure import PressureLoad, PressureRun, measure_pressure
from deploy.bench.report import environment, show_runs, write_result
from deploy.console import console
from deploy.offline.llm import LLM
from deploy.settings import make_settings


def compare_under_pressure(
    settings: dict[str, Any], num_prompts: list[int], num_tokens: int, pressure: float, json_path: Path | None
) -> None:
    """Load the model once and measure each number of prompts; a line for each run as it ends, then a table.

    Raises:
        InvalidRequest: nothing can be compared, or nothing was, at one number of prompts at least.
    """
    max_num_seqs = settings["max_num_seqs"]
    loads = [PressureLoad(count, min(count, max_num_seqs), num_tokens, pressure) for count in num_prompts]
    for load in loads:
        load.check(make_settings(model=settings["model"]).block_size)

    def tell(run: PressureRun) -> None:
        console.print(f"{run.mix}, {run.mode}: {run.output_tokens_per_s} tokens/s in {run.wall_s} s")

    result: dict[str, Any] = {"bench": "pressure", "environment": environment(), "settings": settings}
    llm = LLM(**settings, skip_tokenizer_init=True)
    found = [(load, _measure(llm, load, tell)) for load in loads]
    result["runs"] = [{"load": asdict(load), "runs": [asdict(run) for run in runs]} for load, runs in found]
    write_result(json_path, result)
    llm.close()
    for load, runs in found:
        load.check_pressed(runs)


def _measure(llm: LLM, load: PressureLoad, tell: Callable[[PressureRun], None]) -> list[PressureRun]:
    runs = measure_pressure(llm, load, told=tell)
    title = f"{load.num_prompts} prompts at {load.pressure:g} times the memory"
    show_runs(title, [asdict(run) for run in runs])
    return runs
