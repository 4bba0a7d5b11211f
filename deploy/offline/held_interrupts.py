"""Ctrl-C amid what must not be left half done: it is kept, and strikes at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]


class HeldInterrupts:
    """What came meanwhile."""

    def __init__(self, handler: _Handler | None) -> None:
        """Keep for ``handler``; None: nothing is held."""
        self._handler = handler
        self._frame: FrameType | None = None
        self._has_come = False

    def hold(self, number: int, frame: FrameType | None) -> None:
        """Take the place of the handler. Whoever interrupts again before the first has struck will not wait."""
        if self._has_come:
            self.strike()
        self._has_come, self._frame = True, frame

    def strike(self) -> None:
        """Let the handler have what has come: by default it raises ``KeyboardInterrupt``."""
        if self._has_come and self._handler is not None:
            self._has_come = False
            self._handler(signal.SIGINT, self._frame)


@contextmanager
def interrupts_held() -> Iterator[HeldInterrupts]:
    """Hold SIGINT; at the end, or whenever ``strike`` is called, it does what it would have done. So does a second one.

    Only the main thread hears it, so in another nothing is held, nor where it does not come to Python at all.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield HeldInterrupts(None)
        return
    held = HeldInterrupts(handler)
    signal.signal(signal.SIGINT, held.hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
        held.strike()
