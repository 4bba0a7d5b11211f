"""``shoal serve``: a cluster on this machine from its start to its end, whenever a signal asks for that."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from deploy.console import console, counted
from deploy.own_cluster import leave_nothing
from deploy.refusals import told_as_given
from deploy.settings import ServeSettings
from deploy.stop_signals import Interrupted, StopSignals
from workers.engine.errors import InvalidRequest

if TYPE_CHECKING:
    from deploy.local_cluster import LocalCluster


def serve(given: dict[str, object]) -> None:
    """Start a cluster on this machine and serve MODEL with the OpenAI API until Ctrl-C."""
    signals = StopSignals()
    cluster: LocalCluster | None = None
    try:
        settings, called = _read_settings(given)
        cluster = _start(settings, called)
        _print_ready(cluster.url, cluster.model_name, settings)
        signals.wait()
    except BaseException:  # also what a signal became on its way through somebody else's code
        if signals.number is None:
            if cluster is not None:
                cluster.stop()
            raise
    if cluster is not None:
        _stop(cluster, signals)
        return
    leave_nothing(signals, "Stopped before it was up")


def _read_settings(given: dict[str, object]) -> tuple[ServeSettings, dict[str, str]]:
    """Settings, and what the user calls those that were not given by flag."""
    from deploy.config_file import read_config
    from deploy.json_console import JsonConsole
    from deploy.runtime import Runtime
    from deploy.settings import make_settings, variables_beside

    path = given.pop("config", None)
    from_file = read_config(path) if isinstance(path, Path) else {}
    called = {name: f"{path}, {name}" for name in from_file.keys() - given.keys()}
    given = {**from_file, **given}
    json_console: JsonConsole | None = None
    if given.get("log_format", os.environ.get("SHOAL_LOG_FORMAT")) == "json":
        json_console = JsonConsole()  # before settings are read, so that a refusal is JSON, too
    settings = make_settings(called, **given)
    if json_console is not None:
        json_console.follow(Runtime.of_port(settings.port).serve_logs)
    for note in settings.notes:
        console.print(f"note: {note}", style="dim", highlight=False)
    return settings, {**variables_beside(given), **called}


def _start(settings: ServeSettings, called: dict[str, str]) -> LocalCluster:
    from deploy.local_cluster import start_local_cluster

    try:
        return start_local_cluster(settings)
    except InvalidRequest as error:
        raise InvalidRequest(told_as_given(error.message, called), error.param) from None


def _stop(cluster: LocalCluster, signals: StopSignals) -> None:
    """End it once its requests are done; at the next signal, at once."""
    try:
        console.print("Stopping: running requests end first; Ctrl-C again ends them now")
        _tell(cluster.drain(cluster.settings.drain_timeout_s), "Not done within --drain-timeout-s")
        signals.ignore()  # half of what follows must not be left behind
    except Interrupted:
        signals.ignore()
        console.print("Stopping at once")
        _tell(cluster.drain(0.0), "Not done")
    cluster.stop()
    console.print("Stopped; no process is left.")


def _tell(num_left: int, what: str) -> None:
    if num_left:
        console.print(f"{what}, so ended with an error: {counted(num_left, 'request')}")


def _print_ready(url: str, model: str, settings: ServeSettings) -> None:
    certificate = settings.ssl_certfile
    options = "" if certificate is None else f" --cacert {certificate}"
    if settings.api_key or settings.api_keys:
        options += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    trust = "" if certificate is None else f"SSL_CERT_FILE={certificate} "
    console.print(f"\n[bold]Shoal answers at {url}/v1[/bold]", soft_wrap=True)
    console.print(f"Model {escape(model)}; Ctrl-C stops it\n", soft_wrap=True)
    messages = [{"role": "user", "content": "What is gravity?"}]
    body = {"model": model, "max_tokens": 64, "messages": messages}
    console.print("Try it:", style="dim")
    console.print(
        escape(
            f"  curl{options} {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        ),
        soft_wrap=True,
    )
    console.print(f"  {trust}{invocation()} chat --url {url}/v1\n", soft_wrap=True)


def invocation() -> str:
    """How this process was started, for a reader to type again."""
    if Path(sys.argv[0]).suffix == ".py":  # ``python -m shoal`` names the module's file
        return f"{shlex.quote(sys.executable)} -m shoal"
    return shlex.quote(sys.argv[0])
