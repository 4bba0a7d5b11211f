"""What the command line prints: stages with their times, errors in one line."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from workers.engine.errors import InvalidRequest


class _Console(Console):
    """Goes on in silence when whoever reads it has gone (``| tee`` at Ctrl-C): what runs must still end in order."""

    def on_broken_pipe(self) -> None:
        """Called instead of raising; rich's own ends the process."""
        self.quiet = True

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:  # a terminal that was closed
            self.quiet = True


console: Console = _Console(stderr=True, highlight=False)
"""Progress and errors go to standard error; standard output is for results."""


class Stage:
    """One step of starting up, shown with a spinner on a terminal and as plain lines elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started_s = time.monotonic()
        self._status = console.status(escape(title)) if console.is_terminal else None

    def update(self, detail: str) -> None:
        """Say what it is doing now."""
        if self._status is not None:
            self._status.update(f"{escape(self._title)}: {escape(detail)}")

    def enter(self) -> None:
        """Begin to show it."""
        if self._status is not None:
            self._status.start()

    def leave(self, succeeded: bool, result: str = "") -> None:
        """Replace the spinner by the outcome."""
        if self._status is not None:
            self._status.stop()
        mark = "[green]✓[/green]" if succeeded else "[red]✗[/red]"
        detail = f": {escape(result)}" if result else ""
        console.print(
            f"{mark} {escape(self._title)}{detail} [dim]({time.monotonic() - self._started_s:.1f} s)[/dim]"
        )


@contextmanager
def stage(title: str) -> Iterator[Stage]:
    """Show ``title`` until the block ends, then how long it took."""
    current = Stage(title)
    current.enter()
    try:
        yield current
    except BaseException:
        current.leave(False)
        raise
    current.leave(True)


def read_line(console: Console, prompt: str) -> str | None:
    """What is typed or piped in next; None at the end, or when Ctrl-C is typed.

    Raises:
        InvalidRequest: it is no UTF-8.
    """
    try:
        if sys.stdin.isatty():
            console.print(prompt, end="")
            _wait_for_line()
            prompt = ""
        line = console.input(prompt)
        line.encode()  # Python lets other bytes pass where no locale is set
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8: {error}", "stdin") from None
    return line


def _wait_for_line() -> None:
    """Until a line has been typed on the terminal; raises KeyboardInterrupt at Ctrl-C, whenever it comes.

    A signal that is heard just before ``read`` blocks, or by another thread, would not end the ``read``.
    """
    heard, hears = os.pipe()
    os.set_blocking(hears, False)
    before = signal.set_wakeup_fd(hears, warn_on_full_buffer=False)
    try:
        while sys.stdin not in (ready := select.select([sys.stdin, heard], [], [])[0]):
            if ready:  # a signal: its handler has run when `select` returned
                os.read(heard, 4096)
    finally:
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(hears)


def counted(count: int, noun: str) -> str:
    """So many of it: ``1 replica``, ``2 replicas``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_error(message: str) -> None:
    """One clear line."""
    console.print(f"[red]error:[/red] {escape(message)}")
