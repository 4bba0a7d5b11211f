"""``shoal simulate``: which policy, how many replicas, at what rate, answered on a laptop."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from deploy.bench.report import environment, write_result
from deploy.console import console
from router.placement.policy import POLICIES
from workers.engine.errors import InvalidRequest

SHOWN = {
    "hit_share": "hits",
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "p50",
    "ttft_p99_s": "p99",
    "tpot_mean_s": "TPOT",
    "cpu_s": "CPU",
}
"""Figures in the table, and their headings; seconds all."""


def simulate(
    trace: Annotated[Path, typer.Argument(help="JSON lines, Mooncake's or Shoal's own; .gz or not.")],
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Copies of the model.")] = 4,
    policy: Annotated[
        str, typer.Option(help="Policies to compare, separated by commas; `all` for all of them.")
    ] = "prefix",
    rate: Annotated[float, typer.Option(min=0.001, help="Play the trace this many times as fast.")] = 1.0,
    replica_model: Annotated[
        str, typer.Option(help="A JSON file, or `engine` (Shoal's engine) or `fifo` (a textbook replica).")
    ] = "engine",
    ingress_replicas: Annotated[
        int, typer.Option(min=1, max=256, help="Routers that do not talk; each places every n-th request.")
    ] = 1,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Only the first ones. [all]")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Add the figures to the runs in this file.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write curves of latency, hits and load as a page.")
    ] = None,
) -> None:
    """Replay TRACE in virtual time: the router's own policies and the engine's own scheduler, no GPU."""
    from deploy.simulate.page import Run, render_page
    from deploy.simulate.replica_model import read_replica_model
    from deploy.simulate.simulation import Simulation
    from deploy.simulate.summary import curves, summarize
    from router.trace import read_trace

    names = list(POLICIES) if policy == "all" else policy.split(",")
    for name in names:
        if name not in POLICIES:
            raise InvalidRequest(f"--policy is {name!r}: it must be one of {', '.join(POLICIES)}", "policy")
    model = read_replica_model(replica_model)
    played = read_trace(trace).first(max_requests).at_rate(rate)
    if not played.requests:
        raise InvalidRequest(f"trace {trace} has no requests", "trace")
    settings: dict[str, Any] = {
        "trace": trace.name,
        "requests": len(played.requests),
        "rate": rate,
        "replicas": replicas,
        "ingress_replicas": ingress_replicas,
        "replica_model": model.model_dump(),
    }
    about, figures, runs = environment(), [], []
    for name in names:
        started_s = time.process_time()
        result = Simulation(played, model, POLICIES[name], replicas, ingress_replicas).run()
        cpu_s = round(time.process_time() - started_s, 1)
        run = Run(name, summarize(result, replicas), curves(result, replicas))
        runs.append(run)
        figures.append({"policy": name, **asdict(run.summary), "cpu_s": cpu_s})
    title = f"{trace.name} at {rate:g} times its rate on {replicas} replicas ({model.kind})"
    _show(title, figures)
    if json_path is not None:
        _add_runs(json_path, [{"environment": about, "settings": settings, **one} for one in figures])
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(render_page(title, settings, runs))


def _show(title: str, figures: list[dict[str, Any]]) -> None:
    table = Table("policy", *SHOWN.values(), title=title)
    for one in figures:
        table.add_row(one["policy"], *(f"{one[name]:.4g}" for name in SHOWN))
    console.print(table)


def _add_runs(path: Path, runs: list[dict[str, Any]]) -> None:
    """Append to the results of earlier calls, so that one file can hold a whole comparison."""
    earlier = json.loads(path.read_text())["runs"] if path.exists() else []
    write_result(path, {"bench": "simulate", "runs": [*earlier, *runs]})
