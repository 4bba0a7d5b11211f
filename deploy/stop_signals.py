"""SIGINT, SIGTERM and SIGHUP of a command: each raises ``Interrupted`` in the main thread, or is not heard at all.

SIGHUP says that the terminal is gone. Where it is ignored at first, as ``nohup`` starts a command, it stays so.

Python lets an exception out of a signal's handler pass almost anywhere, also where it is caught and forgotten (in a
destructor, say), so the last signal is kept as well.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

_PATIENCE_S = 10.0
"""For what a start has begun to be cleared away before another signal may disturb that."""


class Interrupted(KeyboardInterrupt):
    """A signal to stop; no Exception, so that nothing on the way takes it for a failure.

    Of this kind since asyncio lets no other out of a callback or of a task that nobody awaits.
    """


def became_of_a_signal(error: BaseException | None) -> bool:
    """Whether ``error`` is what somebody else's code made of ``Interrupted``; C code makes a SystemError of it."""
    while error is not None:
        if isinstance(error, Interrupted):
            return True
        error = error.__cause__ or error.__context__
    return False


class StopSignals:
    """What this process does when it is told to stop. For the main thread.

    Until ``wait``, those that come within seconds after one that has been raised are not heard: it is being obeyed.
    """

    def __init__(self) -> None:
        """Raise ``Interrupted`` at signals from now on."""
        self.number: int | None = None
        """The last signal that was raised; None: none has been."""
        self._patience_s = _PATIENCE_S
        self._deaf_until_s = 0.0
        self._numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._numbers.append(signal.SIGHUP)
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        self._handle(self._on_signal)

    @property
    def exit_code(self) -> int:
        """As shells report a command that a signal has ended; 0 if none came."""
        return 0 if self.number is None else 128 + self.number

    def wait(self) -> None:
        """Return at a signal, also one that came before. From here on each is heard, but a SIGHUP after another."""
        self._patience_s = self._deaf_until_s = 0.0
        try:
            if self.number is None:
                threading.Event().wait()
        except Interrupted:
            return

    def ignore(self) -> None:
        """Hear none any more: what follows must not be left half done."""
        self._handle(signal.SIG_IGN)

    def restore(self) -> None:
        """Let the process do at signals what it did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s < self._deaf_until_s:
            return
        if number == signal.SIGHUP and self.number is not None:
            return  # shell and kernel each send one: the second is nobody's impatience
        self._deaf_until_s = now_s + self._patience_s
        self.number = number
        raise Interrupted

    def _handle(self, handler: object) -> None:
        for number in self._numbers:
            signal.signal(number, handler)  # type: ignore[arg-type]
