"""``shoal bench soak``"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.bench.report import environment, write_result
from deploy.console import console, stage


def soak(
    model: Annotated[
        str | None, typer.Option(help="A model to serve. (default: no model, steps by formula)")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 500,
    duration_s: Annotated[float, typer.Option(min=10, help="How long.")] = 300.0,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    step_s: Annotated[float, typer.Option(min=0, help="Of a step by formula.")] = 0.2,
    input_len: Annotated[int, typer.Option(min=1)] = 64,
    output_len: Annotated[int, typer.Option(min=2)] = 50,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """A steady load on a cluster of its own: what fails, and what grows in memory, files, threads and tasks."""
    from deploy.bench.http_load import LoadPlan
    from deploy.bench.soak import run_soak
    from deploy.served_cluster import ServedCluster

    seats = str(max(8, -(-streams // replicas)))
    flags = ["--replicas", str(replicas), "--max-model-len", "1024", "--max-num-seqs", seats]
    flags += [model, "--cpu-threads", "1"] if model else ["--scripted", "--scripted-step-s", str(step_s)]
    cluster = ServedCluster(*flags)
    try:
        with stage("Cluster"):
            cluster.wait_until_up()
        plan = LoadPlan(f"{cluster.url}/v1", cluster.model, streams, 0, input_len, output_len)
        with stage(f"{streams} streams for {duration_s:g} s"):
            found = asdict(asyncio.run(run_soak(cluster, plan, duration_s)))
        result: dict[str, Any] = {"bench": "soak", "environment": environment(), "flags": flags, **found}
        write_result(json_path, result)
    finally:
        cluster.stop()
    console.print_json(data=result)
