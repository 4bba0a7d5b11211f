"""``shoal bench scale-step``"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.bench.options import MOST_TIMES, JsonOption, check_order, checked_output, finite
from deploy.bench.report import environment, write_result
from deploy.console import console, stage
from deploy.output_file import open_output
from deploy.own_cluster import own_cluster, run_on


@own_cluster()
def scale_step(
    low: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_TIMES,
            callback=finite,
            help="Requests a second before and after; 0: replicas may go to zero, too.",
        ),
    ] = 1.0,
    high: Annotated[
        float, typer.Option(min=0.1, max=MOST_TIMES, callback=finite, help="And in between.")
    ] = 12.0,
    max_replicas: Annotated[int, typer.Option(min=2, max=1024)] = 3,
    json_path: JsonOption = None,
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", help="Draw replicas over time here.", callback=checked_output),
    ] = None,
) -> None:
    """A step in load on a cluster of its own that scales: replicas over time. No model, steps by formula."""
    check_order("--low", low, "--high", high)
    from deploy.bench.http_load import LoadPlan
    from deploy.bench.scale_step import StepPlan, run_step
    from deploy.served_cluster import ServedCluster
    from deploy.simulate.chart import make_chart

    flags = [
        *("--scripted", "--scripted-step-s", "0.03", "--max-num-seqs", "16", "--target-tpot-s", "0.05"),
        *("--replicas", "1", "--min-replicas", "1" if low else "0", "--max-replicas", str(max_replicas)),
        *("--downscale-delay-s", "10", "--scale-to-zero-delay-s", "10"),
    ]
    plan = StepPlan(low, high, step_s=10.0, back_s=40.0, end_s=75.0 if low else 120.0)
    cluster = ServedCluster(*flags)
    try:
        with stage("Cluster"):
            cluster.wait_until_up()
        request = LoadPlan(f"{cluster.url}/v1", cluster.model, 0, 0, input_len=32, output_len=100)
        with stage(f"{low:g} requests/s, {high:g} from {plan.step_s:g} to {plan.back_s:g} s"):
            found = run_on(cluster, run_step(cluster, request, plan))
        result: dict[str, Any] = {"bench": "scale-step", "environment": environment(), "flags": flags}
        write_result(json_path, {**result, "plan": asdict(plan), **asdict(found)})
    finally:
        cluster.stop()
    console.print_json(
        data={name: value for name, value in asdict(found).items() if not isinstance(value, list)}
    )
    if svg_path is not None:
        tens = [(at_s, count / 10) for at_s, count in found.requests]
        chart = make_chart("A step in load", {"replicas": found.replicas, "tens of requests": tens})
        with open_output(svg_path, "--svg") as file:
            file.write(chart.svg)
