"""``shoal bench soak``"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.options import JsonOption, check_spread, finite
from deploy.bench.report import environment, write_result
from deploy.console import console, stage
from deploy.deployed_cluster import DeployedCluster
from deploy.served_cluster import ServedCluster
from workers.engine.errors import InvalidRequest

_CONTEXT = 1024


def soak(
    model: Annotated[
        str | None, typer.Option(help="A model to serve. (default: no model, steps by formula)")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 500,
    duration_s: Annotated[float, typer.Option(min=10, callback=finite, help="How long.")] = 300.0,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    step_s: Annotated[float, typer.Option(min=0, callback=finite, help="Of a step by formula.")] = 0.2,
    input_len: Annotated[int, typer.Option(min=1)] = 64,
    output_len: Annotated[int, typer.Option(min=2)] = 50,
    spread: Annotated[int, typer.Option(min=0, help="Prompts' lengths are uniform from this much less.")] = 0,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="KV blocks of a replica; few are soon written. (default: by memory)"),
    ] = None,
    swap_space: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="GiB of host memory for KV blocks.")
    ] = None,
    rollout: Annotated[
        bool,
        typer.Option(
            help="In the middle, replace every replica and then every ingress process by a new one."
        ),
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """A steady load on a cluster of its own: what fails, and what grows in memory, files, threads and tasks."""
    from deploy.bench.http_load import LoadPlan
    from deploy.bench.soak import run_soak
    from deploy.client import Client

    check_spread(spread, input_len=input_len)
    if input_len + output_len > _CONTEXT:
        raise InvalidRequest(
            f"--input-len {input_len} and --output-len {output_len} come to {input_len + output_len} tokens, the "
            f"context is {_CONTEXT}: lower them",
            "input_len",
        )
    engine: dict[str, Any] = {"max_model_len": _CONTEXT, "max_num_seqs": max(8, -(-streams // replicas))}
    if kv_blocks is not None:
        engine["num_gpu_blocks_override"] = kv_blocks
    if swap_space is not None:
        engine["swap_space"] = swap_space
    engine |= {"cpu_threads": 1} if model else {"scripted": True, "scripted_step_s": step_s}
    with stage("Cluster"):
        cluster = _deployed(engine, replicas, model) if rollout else _served(engine, replicas, model)
    try:
        url = f"{cluster.url}/v1"
        plan = LoadPlan(url, Client(url).first_model(), streams, 0, input_len, output_len, spread=spread)
        with stage(f"{streams} streams for {duration_s:g} s"):
            change = _roll(cluster) if isinstance(cluster, DeployedCluster) else None
            found = asdict(asyncio.run(run_soak(cluster, plan, duration_s, change)))
        settings = {"model": model, "replicas": replicas, "engine": engine}
        result: dict[str, Any] = {
            "bench": "soak", "environment": environment(), "settings": settings, **found,
        }  # fmt: skip
        write_result(json_path, result)
    finally:
        cluster.stop()
    console.print_json(data=result)
    if found["num_failed"]:
        console.print(f"{found['num_failed']} of {found['num_requests']} requests failed")
        raise typer.Exit(1)


def _served(engine: dict[str, Any], replicas: int, model: str | None) -> ServedCluster:
    """As ``shoal serve`` starts it."""
    flags = [model] if model else []
    for name, value in engine.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    cluster = ServedCluster(*flags, "--replicas", str(replicas))
    try:
        cluster.wait_until_up()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _deployed(engine: dict[str, Any], replicas: int, model: str | None) -> DeployedCluster:
    """As ``shoal deploy`` makes it, which can be changed; each replica may finish what it has."""
    return DeployedCluster(engine, replicas, model="soak", source=model)


def _roll(cluster: DeployedCluster) -> Callable[[], None]:
    def roll() -> None:
        cluster.roll_model()
        cluster.roll_ingress()

    return roll
