"""The command ``shoal``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from deploy.bench.cli import app as bench
from deploy.client_commands import chat, complete, run_batch
from deploy.console import console, print_error
from deploy.deploy_command import deploy
from deploy.fetch_command import fetch
from deploy.flags import with_flags
from deploy.generate_command import generate
from deploy.grouped_help import GroupedHelp
from deploy.plan_command import plan
from deploy.quantize.command import quantize
from deploy.settings import ServeSettings
from deploy.simulate.cli import simulate
from deploy.simulate.trace_cli import app as trace
from workers.engine.errors import ShoalError

if TYPE_CHECKING:
    from deploy.local_cluster import LocalCluster

app = typer.Typer(
    name="shoal",
    help="Serve large language models on a Ray cluster; try one on this machine with `shoal serve`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def serve(given: dict[str, object]) -> None:
    """Start a cluster on this machine and serve MODEL with the OpenAI API until Ctrl-C."""
    from deploy.config_file import read_config
    from deploy.json_console import JsonConsole
    from deploy.local_cluster import start_local_cluster
    from deploy.runtime import Runtime
    from deploy.settings import make_settings

    path = given.pop("config", None)
    given = {**(read_config(path) if isinstance(path, Path) else {}), **given}
    json_console: JsonConsole | None = None
    if given.get("log_format", os.environ.get("SHOAL_LOG_FORMAT")) == "json":
        json_console = JsonConsole()  # before settings are read, so that a refusal is JSON, too
    settings = make_settings(**given)
    if json_console is not None:
        json_console.follow(Runtime.of_port(settings.port).serve_logs)
    for note in settings.notes:
        console.print(f"note: {note}", style="dim", highlight=False)

    _interrupt_on_signals()
    cluster = None
    try:
        cluster = start_local_cluster(settings)
        _print_ready(cluster.url, cluster.model_name, settings)
        threading.Event().wait()
    except _Interrupted:
        pass
    finally:
        if cluster is not None:
            _stop(cluster)
    if cluster is None:
        raise typer.Exit(130)  # as shells report an interrupted command


def _stop(cluster: LocalCluster) -> None:
    """End it once its requests are done; at the next signal, at once."""
    console.print("Stopping: running requests end first; Ctrl-C again ends them now")
    try:
        num_left = cluster.drain()
        if num_left:
            console.print(f"Not done within --drain-timeout-s, so ended with an error: {num_left} requests")
    except _Interrupted:
        console.print("Stopping at once")
    _ignore_signals()  # half of it must not be left behind
    cluster.stop()
    console.print("Stopped; no process is left.")


app.command(name="serve", cls=GroupedHelp, context_settings={"max_content_width": 100})(with_flags(serve))


app.command()(chat)
app.command()(complete)
app.command()(generate)
app.command()(run_batch)
app.command()(deploy)
app.command()(fetch)
app.command()(plan)
app.command()(quantize)
app.command()(simulate)
app.add_typer(trace, name="trace")
app.add_typer(bench, name="bench")


class _Interrupted(BaseException):
    """Ctrl-C or SIGTERM; no Exception, so that nothing on the way takes it for a failure."""


def _interrupt_on_signals() -> None:
    def on_signal(number: int, frame: object) -> None:
        raise _Interrupted

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _print_ready(url: str, model: str, settings: ServeSettings) -> None:
    certificate = settings.ssl_certfile
    options = "" if certificate is None else f" --cacert {certificate}"
    if settings.api_key or settings.api_keys:
        options += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    trust = "" if certificate is None else f"SSL_CERT_FILE={certificate} "
    console.print(f"\n[bold]Shoal answers at {url}/v1[/bold]  (model {escape(model)}; Ctrl-C stops it)\n")
    console.print("Try it:", style="dim")
    console.print(
        escape(
            f"  curl{options} {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{model}", "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "What is gravity?"}]}\''
        ),
        soft_wrap=True,
    )
    console.print(f"  {trust}{invocation()} chat --url {url}/v1\n", soft_wrap=True)


def invocation() -> str:
    """How this process was started, for a reader to type again."""
    if Path(sys.argv[0]).suffix == ".py":  # ``python -m shoal`` names the module's file
        return f"{shlex.quote(sys.executable)} -m shoal"
    return shlex.quote(sys.argv[0])


def main() -> None:
    """Run the command line; errors meant for people become one line and exit code 1."""
    # vLLM's users write flags with underscores, too.
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments = [*(_with_dashes(argument) for argument in given[:end]), *given[end:]]
    try:
        app(arguments, prog_name="shoal")
    except ShoalError as error:
        print_error(str(error))
        raise SystemExit(1) from None


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, sign, value = argument.partition("=")
    return name.replace("_", "-") + sign + value


if __name__ == "__main__":
    main()
