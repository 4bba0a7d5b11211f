"""``shoal bench http``"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from deploy.bench.cluster_options import check_streams
from deploy.bench.options import JsonOption, whole_numbers
from deploy.bench.report import environment, show_runs, write_result
from workers.engine.errors import InvalidRequest


def http(
    url: Annotated[str, typer.Option(help="The endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="(default: the first served)")] = None,
    streams: Annotated[str, typer.Option(help="Streams at once, separated by commas.")] = "1,32",
    requests_per_stream: Annotated[int, typer.Option(min=1)] = 8,
    input_len: Annotated[int, typer.Option(min=1)] = 64,
    output_len: Annotated[int, typer.Option(min=2)] = 200,
    json_path: JsonOption = None,
) -> None:
    """Streamed completions from a running cluster, one SSE chunk a token, with CPU time by process."""
    from deploy.bench.cpu_time import CpuTimes
    from deploy.bench.http_load import LoadPlan, run_load
    from deploy.client import Client, ClientError, endpoint

    counts, url = whole_numbers(streams, "--streams"), endpoint(url)
    if not url.startswith("http://"):
        raise InvalidRequest(f"--url is {url}, this load speaks plain http:// only", "url")
    check_streams(max(counts))
    name = model or Client(url).first_model()
    result: dict[str, Any] = {"bench": "http", "environment": environment(), "runs": []}
    # No prompt is sent twice, not by another call either: the cluster's cache would answer it.
    seeds = random.SystemRandom()
    for count in counts:
        plan = LoadPlan(url, name, count, requests_per_stream, input_len, output_len)
        try:
            asyncio.run(run_load(replace(plan, requests_per_stream=1, seed=seeds.getrandbits(32))))  # warm-up
            before = CpuTimes.now()
            found = asyncio.run(run_load(replace(plan, seed=seeds.getrandbits(32))))
        except OSError as error:
            raise ClientError(f"{url} does not answer: {error}") from error
        if found.num_failed == found.num_requests:
            raise ClientError(
                f"all {found.num_failed} requests to {url} for model {name!r} failed: nothing to measure"
            )
        cpu_us = before.per_token_us(CpuTimes.now(), found.num_chunks)
        result["runs"].append({**asdict(found), "cpu_us_per_token": cpu_us})
    show_runs("http", [{k: v for k, v in run.items() if k != "cpu_us_per_token"} for run in result["runs"]])
    show_runs("CPU microseconds a token, by process", [run["cpu_us_per_token"] for run in result["runs"]])
    write_result(json_path, result)
