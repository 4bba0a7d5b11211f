"""Commands with a cluster of their own: a signal to stop ends the cluster first, at any moment, then the command."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import typer

from deploy.console import console
from deploy.ray_cluster import end_unfinished
from deploy.stop_signals import Interrupted, StopSignals

R = TypeVar("R")


class OwnCluster(Protocol):
    """What a command has started."""

    def stop(self) -> object:
        """End everything. Safe to call twice."""


@contextmanager
def own_cluster() -> Iterator[None]:
    """Run a command, which this may decorate, that stops in its ``finally`` what it starts.

    Raises:
        typer.Exit: it has been told to stop, and no process is left; with the code that shells report.
    """
    signals = StopSignals()
    try:
        yield
    except BaseException:  # also what a signal became on its way through somebody else's code
        if signals.number is None:
            signals.restore()
            raise
    if signals.number is not None:
        leave_nothing(signals, "Stopped")
    signals.restore()


def leave_nothing(signals: StopSignals, what: str) -> NoReturn:
    """End what this process has begun to start, wherever it was interrupted, and then the command.

    Raises:
        typer.Exit: always.
    """
    signals.ignore()
    end_unfinished()
    console.print(f"{what}; no process is left.")
    raise typer.Exit(signals.exit_code)


def run_on(cluster: OwnCluster, work: Coroutine[Any, Any, R]) -> R:
    """Run ``work``, which asks and changes ``cluster``; a signal to stop ends the cluster and then ``work``.

    In this order, since a thread that changes the cluster waits for it, and is waited for.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_tell_failures)
        try:
            return runner.run(work)
        except Interrupted:
            cluster.stop()
            raise


def _tell_failures(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As asyncio does, but for a signal that came while a task ran: it ends that task, and is no failure of it."""
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)
