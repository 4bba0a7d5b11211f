"""A wait that tells of itself when it is long, so that nobody looks at a terminal where nothing happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape

from deploy.console import console


@contextmanager
def told_when_long(whom: str, after_s: float) -> Iterator[None]:
    """Say once, on standard error, that nothing has come from ``whom`` if the block has not ended after ``after_s``."""

    def tell() -> None:
        console.print(
            f"Nothing has come from {escape(whom)} for {after_s:g} s: still waiting, Ctrl-C ends it",
            soft_wrap=True,
        )

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
