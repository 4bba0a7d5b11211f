"""``shoal bench ...``: a file for each command."""

from __future__ import annotations

import typer

from deploy.bench.chaos_command import chaos
from deploy.bench.fairness_command import fairness
from deploy.bench.http_command import http
from deploy.bench.kernels_command import kernels
from deploy.bench.latency_command import latency
from deploy.bench.memory_command import memory
from deploy.bench.perplexity_command import perplexity
from deploy.bench.scale_step_command import scale_step
from deploy.bench.soak_command import soak
from deploy.bench.structured_command import structured
from deploy.bench.tensor_parallel_command import tensor_parallel
from deploy.bench.throughput_command import throughput

app = typer.Typer(
    help="Measure this machine; results as a table and, with --json, as a file.", no_args_is_help=True
)
app.command()(throughput)
app.command()(latency)
app.command()(memory)
app.command()(structured)
app.command()(perplexity)
app.command("tensor-parallel")(tensor_parallel)
app.command()(kernels)
app.command()(http)
app.command()(soak)
app.command("scale-step")(scale_step)
app.command()(chaos)
app.command()(fairness)
