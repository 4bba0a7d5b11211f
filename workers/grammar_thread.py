"""Matchers made beside the brain's loop: a grammar may take half a second to compile, and steps must not wait."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from workers.engine.constraint import Matcher
from workers.engine.request import EngineRequest

Compile = Callable[[str], Matcher]

STACK_BYTES = 16 << 20
"""Grammars are compiled by recursion; those that come here have been compiled at the door with an eighth of it."""


class GrammarThread:
    """Takes requests with grammars, gives them back with matchers, in order. For one caller."""

    def __init__(self, load: Callable[[], Compile]) -> None:
        """Start the thread, which calls ``load`` first; what that raises fails every request."""
        self._wanted: queue.SimpleQueue[EngineRequest | None] = queue.SimpleQueue()
        self._made: deque[tuple[EngineRequest, Matcher | Exception]] = deque()
        self._cancelled: set[str] = set()
        self._pending: set[str] = set()
        self._doorbell, self._ringer = os.pipe()
        os.set_blocking(self._doorbell, False)
        self._thread = threading.Thread(target=self._run, args=(load,), daemon=True, name="grammars")
        usual_bytes = threading.stack_size(STACK_BYTES)
        self._thread.start()
        threading.stack_size(usual_bytes)

    def put(self, request: EngineRequest) -> None:
        """Have a matcher made."""
        self._pending.add(request.request_id)
        self._wanted.put(request)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False if it is not here."""
        if request_id not in self._pending:
            return False
        self._pending.remove(request_id)
        self._cancelled.add(request_id)
        return True

    def take(self) -> list[tuple[EngineRequest, Matcher | Exception]]:
        """Requests whose matchers are made, or what went wrong instead."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._doorbell, 4096)
        taken = []
        while self._made:
            request, outcome = self._made.popleft()
            if request.request_id in self._cancelled:
                self._cancelled.remove(request.request_id)
                continue
            self._pending.discard(request.request_id)
            taken.append((request, outcome))
        return taken

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._doorbell

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._wanted.put(None)
        self._thread.join()
        os.close(self._doorbell)
        os.close(self._ringer)

    def _run(self, load: Callable[[], Compile]) -> None:
        compile_: Compile | None = None
        failure: Exception | None = None
        try:
            compile_ = load()
        except BaseException as error:  # noqa: BLE001 - whoever needs it is told
            failure = _as_exception(error)
        while (request := self._wanted.get()) is not None:
            outcome: Matcher | Exception
            try:
                outcome = failure or _made(compile_, request)
            except BaseException as error:  # noqa: BLE001 - it is this request's alone
                outcome = _as_exception(error)
            self._made.append((request, outcome))
            os.write(self._ringer, b"x")


def _as_exception(error: BaseException) -> Exception:
    """A panic of a library as an error like others: without this thread no grammar would be compiled any more."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _made(compile_: Compile | None, request: EngineRequest) -> Matcher:
    assert compile_ is not None, "loading has not failed"
    return compile_(request.params.grammar)
