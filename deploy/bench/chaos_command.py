"""``shoal bench chaos``"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.cluster_options import check_cluster, check_streams, model_from_anywhere
from deploy.bench.options import JsonOption, above_zero, check_context, finite
from deploy.bench.report import environment, write_result
from deploy.console import console, stage
from deploy.durations import MOST_S
from deploy.own_cluster import own_cluster, run_on
from deploy.tables import print_table
from workers.engine.errors import InvalidRequest

HEADINGS = ("streams", "under way", "ended", "intact", "moved", "missed", "gap p50", "p99", "back")
"""Streams, then seconds: see ``ChaosResult``."""


@own_cluster()
def chaos(
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a hub id. (default: the demo model)")
    ] = None,
    replicas: Annotated[int, typer.Option(min=2, max=1024, help="Copies of the model.")] = 3,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", min=1, max=64)] = 1,
    streams: Annotated[
        int,
        typer.Option(
            min=1,
            help="Streams at once, every second one sampled; each begins again until the fault is over.",
        ),
    ] = 32,
    output_len: Annotated[int, typer.Option(min=32, help="Tokens of a stream.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, callback=finite, help="Of the sampled streams; each has a seed.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of each fault.")] = 1,
    faults: Annotated[str, typer.Option(help="Separated by commas; `all` for all.")] = "all",
    stall_timeout_s: Annotated[
        float, typer.Option(max=MOST_S, callback=above_zero, help="When a stopped process counts as stuck.")
    ] = 10.0,
    drain_timeout_s: Annotated[
        float,
        typer.Option(min=0, max=MOST_S, callback=finite, help="How long a replica that leaves may go on."),
    ] = 2.0,
    json_path: JsonOption = None,
) -> None:
    """Kill, stop, scale and roll out parts of a cluster of its own while streams run; count those that notice."""
    from deploy.bench.chaos import run_round
    from deploy.bench.faults import CHANGES, FAULTS, Fault
    from deploy.bench.streams import MAX_PROMPT_LEN, StreamPlan
    from deploy.deployed_cluster import DeployedCluster

    known: dict[str, Fault[DeployedCluster]] = {}
    known.update((fault.name, fault) for fault in FAULTS)
    known.update((fault.name, fault) for fault in CHANGES)
    names = list(known) if faults == "all" else faults.split(",")
    for name in names:
        if name not in known:
            raise InvalidRequest(f"--faults has {name!r}: it must be of {', '.join(known)}", "faults")
    check_streams(streams)
    check_context(model, None, MAX_PROMPT_LEN + output_len, f"--output-len {output_len}")
    plan = StreamPlan(streams, output_len, temperature)
    engine = {
        "tensor_parallel_size": tensor_parallel_size,
        "stall_timeout_s": stall_timeout_s,
        "drain_timeout_s": drain_timeout_s,
        "cpu_threads": max(1, (os.cpu_count() or 1) // (replicas * tensor_parallel_size)),
    }
    check_cluster({"model": model, "replicas": replicas, **engine})
    settings = {"replicas": replicas, "ingresses": 2, "engine": engine, "plan": asdict(plan)}
    result: dict[str, Any] = {
        "bench": "chaos",
        "environment": environment(),
        "settings": settings,
        "runs": [],
    }
    with stage("Cluster"):
        cluster = DeployedCluster(engine, replicas, source=model_from_anywhere(model))
    try:
        for name in names:
            for _ in range(rounds):
                with stage(name):
                    result["runs"].append(asdict(run_on(cluster, run_round(cluster, known[name], plan))))
                write_result(json_path, result)  # what is there, should the next round fail
    finally:
        cluster.stop()
    _show(result["runs"])


def _show(runs: list[dict[str, Any]]) -> None:
    rows = []
    for one in runs:
        counts = (one[f"num_{what}"] for what in ("streams", "under_way", "ended", "intact", "moved"))
        seconds = (one["detection_s"], one["gap_p50_s"], one["gap_p99_s"], one["replica_back_s"])
        rows.append([one["fault"], *map(str, counts), *("" if s is None else f"{s:.2g}" for s in seconds)])
    print_table(console, ["fault", *HEADINGS], rows, "chaos: streams and seconds")
