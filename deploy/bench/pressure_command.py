"""``shoal bench throughput --kv-pressure``: what to do when requests need more KV memory than there is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.bench.pressure import PressureLoad, PressureRun, measure_pressure
from deploy.bench.report import environment, show_runs, write_result
from deploy.console import console
from deploy.offline.llm import LLM


def compare_under_pressure(
    settings: dict[str, Any], num_prompts: list[int], num_tokens: int, pressure: float, json_path: Path | None
) -> None:
    """Load the model once and measure each number of prompts; a line for each run as it ends, then a table."""

    def tell(run: PressureRun) -> None:
        console.print(f"{run.mix}, {run.mode}: {run.output_tokens_per_s} tokens/s in {run.wall_s} s")

    result: dict[str, Any] = {"bench": "pressure", "environment": environment(), "settings": settings}
    llm = LLM(**settings, skip_tokenizer_init=True)
    result["runs"] = []
    for count in num_prompts:
        load = PressureLoad(count, min(count, settings["max_num_seqs"]), num_tokens, pressure)
        runs = [asdict(run) for run in measure_pressure(llm, load, told=tell)]
        result["runs"].append({"load": asdict(load), "runs": runs})
        show_runs(f"{count} prompts at {pressure:g} times the memory", runs)
    write_result(json_path, result)
    llm.close()
