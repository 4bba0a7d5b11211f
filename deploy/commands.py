"""What the command ``shoal`` can do: its commands by name."""

from __future__ import annotations

import typer

from deploy.bench.cli import app as bench
from deploy.client_commands import chat, complete, run_batch
from deploy.command_group import Commands
from deploy.deploy_command import deploy
from deploy.engine_command import EngineCommand
from deploy.fetch_command import fetch
from deploy.flags import with_engine_flags, with_flags
from deploy.generate_command import generate
from deploy.plan_command import plan
from deploy.quantize.command import quantize
from deploy.serve_command import serve
from deploy.simulate.cli import simulate
from deploy.simulate.trace_cli import app as trace

_WIDE = {"max_content_width": 100}

app = typer.Typer(
    cls=Commands,
    name="shoal",
    help="Serve large language models on a Ray cluster; try one on this machine with `shoal serve`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="serve", cls=EngineCommand, context_settings=_WIDE)(with_flags(serve))
app.command()(chat)
app.command()(complete)
app.command()(generate)
app.command(name="run-batch", cls=EngineCommand, context_settings=_WIDE)(with_engine_flags(run_batch))
app.command()(deploy)
app.command()(fetch)
app.command()(plan)
app.command()(quantize)
app.command()(simulate)
app.add_typer(trace, name="trace")
app.add_typer(bench, name="bench")
