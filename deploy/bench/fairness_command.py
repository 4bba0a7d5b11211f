"""``shoal bench fairness``"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from deploy.bench.options import MOST_TIMES, JsonOption, finite
from deploy.bench.report import environment, write_result
from deploy.console import console, stage
from deploy.durations import MOST_S
from deploy.own_cluster import own_cluster, run_on

SEATS, STEP_S, INPUT_LEN, OUTPUT_LEN = 8, 0.05, 32, 20
"""Of each of two replicas that speak by formula: 15 requests a second in all."""
_CAPACITY_PER_S = 2 * SEATS / ((OUTPUT_LEN + 1) * STEP_S)


@own_cluster()
def fairness(
    factor: Annotated[
        float,
        typer.Option(
            min=1, max=MOST_TIMES, callback=finite, help="By which the noisy caller exceeds its share."
        ),
    ] = 10.0,
    phase_s: Annotated[
        float,
        typer.Option(min=5, max=MOST_S, callback=finite, help="How long it does, and how long it does not."),
    ] = 60.0,
    json_path: JsonOption = None,
) -> None:
    """One caller floods a cluster of its own: what four others notice. No model, steps by formula."""
    from deploy.bench.fairness import FairnessPlan, key_file, run_fairness
    from deploy.bench.http_load import LoadPlan
    from deploy.served_cluster import ServedCluster

    plan = FairnessPlan(4, 0.15 * _CAPACITY_PER_S, 0.38 * _CAPACITY_PER_S, factor, phase_s)
    with TemporaryDirectory(prefix="shoal-fairness-") as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(key_file(plan))
        flags = [
            *(
                "--scripted",
                "--scripted-step-s",
                str(STEP_S),
                "--max-num-seqs",
                str(SEATS),
                "--replicas",
                "2",
            ),
            *("--max-model-len", "1024", "--api-keys", str(keys)),
        ]
        cluster = ServedCluster(*flags)
        try:
            with stage("Cluster"):
                cluster.wait_until_up()
            request = LoadPlan(f"{cluster.url}/v1", cluster.model, 0, 0, INPUT_LEN, OUTPUT_LEN)
            with stage(f"{2 * phase_s:g} s of load"):
                found = run_on(cluster, run_fairness(request, plan))
        finally:
            cluster.stop()
    result: dict[str, Any] = {"bench": "fairness", "environment": environment(), "flags": flags[:-2]}
    result |= {"plan": asdict(plan), **asdict(found), "ratio": found.ratio}
    write_result(json_path, result)
    console.print_json(data=result)
