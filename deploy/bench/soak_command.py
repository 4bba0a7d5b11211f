"""``shoal bench soak``"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.bench.cluster_options import check_cluster, check_streams, model_from_anywhere
from deploy.bench.options import JsonOption, check_context, check_spread, finite
from deploy.bench.report import environment, write_result
from deploy.console import console, stage
from deploy.deployed_cluster import DeployedCluster
from deploy.durations import MOST_S
from deploy.own_cluster import own_cluster, run_on
from deploy.served_cluster import ServedCluster
from deploy.setting_values import MOST_GIB
from workers.engine.errors import InvalidRequest

_MAX_MODEL_LEN = 1024


@own_cluster()
def soak(
    model: Annotated[
        str | None, typer.Option(help="A model to serve. (default: no model, steps by formula)")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 500,
    duration_s: Annotated[float, typer.Option(min=10, max=MOST_S, callback=finite, help="How long.")] = 300.0,
    replicas: Annotated[int, typer.Option(min=1, max=1024)] = 2,
    step_s: Annotated[
        float, typer.Option(min=0, max=MOST_S, callback=finite, help="Of a step by formula.")
    ] = 0.2,
    input_len: Annotated[int, typer.Option(min=1)] = 64,
    output_len: Annotated[int, typer.Option(min=2)] = 50,
    spread: Annotated[int, typer.Option(min=0, help="Prompts' lengths are uniform from this much less.")] = 0,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="KV blocks of a replica; few are soon written. (default: by memory)"),
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(min=0, max=MOST_GIB, callback=finite, help="GiB of host memory for KV blocks."),
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
    check_streams(streams)
    longest = _longest_request(model, input_len, output_len, kv_blocks)
    engine: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": min(4096, max(8, -(-streams // replicas))),
    }
    if kv_blocks is not None:
        engine["num_gpu_blocks_override"] = kv_blocks
    if swap_space is not None:
        engine["swap_space"] = swap_space
    engine |= {"cpu_threads": 1} if model else {"scripted": True, "scripted_step_s": step_s}
    check_cluster({"model": model, "replicas": replicas, **engine})
    with stage("Cluster"):
        source = model_from_anywhere(model)
        cluster = _deployed(engine, replicas, source) if rollout else _served(engine, replicas, source)
    try:
        url = f"{cluster.url}/v1"
        plan = LoadPlan(url, Client(url).first_model(), streams, 0, input_len, output_len, spread=spread)
        with stage(f"{streams} streams for {duration_s:g} s"):
            change = _roll(cluster) if isinstance(cluster, DeployedCluster) else None
            found = asdict(run_on(cluster, run_soak(cluster, plan, duration_s, change)))
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


def _longest_request(model: str | None, input_len: int, output_len: int, kv_blocks: int | None) -> int:
    """Tokens that requests may have: more than they need, where model and blocks allow.

    Raises:
        UserError: what they need is more than that, or there is no such model.
    """
    from deploy.bench.soak import BLOCK_SIZE

    needed = input_len + output_len
    longest = check_context(model, None, needed, f"--input-len {input_len} and --output-len {output_len}")
    if kv_blocks is not None:
        if kv_blocks * BLOCK_SIZE < needed:
            raise InvalidRequest(
                f"--kv-blocks is {kv_blocks}, a request of {needed} tokens (--input-len {input_len}, --output-len "
                f"{output_len}) needs {-(-needed // BLOCK_SIZE)}: give as many or more",
                "kv_blocks",
            )
        longest = min(longest, kv_blocks * BLOCK_SIZE)
    return min(longest, max(needed, _MAX_MODEL_LEN))


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
