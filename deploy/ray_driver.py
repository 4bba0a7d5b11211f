"""What Ray does by itself in the process that starts it, and is kept from.

Signals, a fixed port, paragraphs, another start.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from deploy.console import console
from workers.engine.errors import ShoalError

_MOST_CHARS = 200


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep Ray from putting handlers of its own, which print a stack and exit, in the place of ours.

    And its daemons from signals to this process's group, as Ctrl-C and ``timeout`` send them: a driver that loses its
    raylet while it connects to it prints an error and exits in C, or waits for half a minute.
    """
    from ray import _private

    utils: Any = _private.utils
    services: Any = _private.services
    set_handler, popen = utils.set_sigterm_handler, services.ConsolePopen
    utils.set_sigterm_handler = lambda handler: None
    services.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        utils.set_sigterm_handler, services.ConsolePopen = set_handler, popen


@contextlib.contextmanager
def agent_on_any_port() -> Iterator[None]:
    """Have the agent of a node that is started listen where it may, by default on 52365 for each cluster of a machine.

    That of a second cluster tries for seconds, and then goes without.
    """
    from ray import _private

    parameter: Any = _private.parameter
    params = parameter.RayParams
    parameter.RayParams = functools.partial(params, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = params


def tell_shortly(logs: Path) -> None:
    """From now on tell what Ray's processes report in a line each, on our console.

    Ray prints it to standard output: of each process that is killed, a paragraph on what may have killed it.
    """
    from ray import _private

    worker: Any = _private.worker

    def tell(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        for text in data["lines"]:
            console.print(escape(short_report(str(text), logs)), style="dim", soft_wrap=True)

    worker.print_to_stdstream = tell


def short_report(text: str, logs: Path) -> str:
    """The first thing that a report of Ray's says; of a process that has died, which."""
    if dead := re.search(r"A worker died or was killed.*Worker PID: (\d+)", text, re.DOTALL):
        return f"Process {dead[1]} of the cluster has died; logs: {logs}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"Ray says: {first[:_MOST_CHARS]}; logs: {logs}"


def start_no_more(ray: Any) -> None:
    """Have ``ray`` refuse to start: a thread that still deploys would begin a new cluster in place of the one ended."""

    def refuse(*_: object, **__: object) -> None:
        raise ShoalError("the cluster is being ended")

    ray.init = refuse
