"""Writes down what requests an ingress gets, for ``shoal simulate``: arrivals, lengths, block hashes; no text.

Lines are encoded and written by a thread of their own, so that a request costs the event loop a queue's put.
Whoever reads a trace can tell whether a prompt that he guesses was there, since hashes are not keyed.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from router.journal import Journal
from router.trace_lines import TraceRequest, header_line, request_line

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
"""Of one ingress's file; then recording ends, and the log says so."""
MAX_QUEUED = 10_000
"""Requests that wait for a slow disk; further ones are left out of the trace, and counted in the log."""


class TraceRecorder:
    """One model's requests at one ingress, in one file of ``folder``; made when the first request ends."""

    def __init__(
        self, folder: Path, model: str, wall_clock: Callable[[], float], max_bytes: int = MAX_BYTES
    ) -> None:
        """``wall_clock`` gives seconds that all ingresses agree on, so that their files can be merged."""
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', model)}-{uuid4().hex[:12]}.jsonl"
        self._wall_clock = wall_clock
        self._max_bytes = max_bytes
        self._queue: queue.SimpleQueue[tuple[int, TraceRequest] | None] = queue.SimpleQueue()
        self._has_ended = False
        self._num_left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="trace-recorder", daemon=True)
        self._thread.start()

    def note(self, journal: Journal, age_s: float) -> None:
        """Record a request that ended now and came ``age_s`` seconds ago; one that no replica had is left out."""
        hashed = journal.prompt.hashed()
        if hashed is None or self._has_ended:
            return
        if self._queue.qsize() >= MAX_QUEUED:
            self._num_left_out += 1
            return
        block_size, hashes = hashed
        one = TraceRequest(
            self._wall_clock() - age_s, len(journal.prompt), len(journal.output_token_ids), hashes
        )
        self._queue.put((block_size, one))

    @property
    def num_queued(self) -> int:
        """Requests that are not written yet."""
        return self._queue.qsize()

    def close(self) -> None:
        """Write what is queued and end the thread. Safe to call twice; blocks for as long as the disk needs."""
        self._queue.put(None)
        self._thread.join()
        if self._num_left_out:
            log.warning("trace %s lacks %d requests: the disk was too slow", self.path, self._num_left_out)
            self._num_left_out = 0

    def _write_all(self) -> None:
        try:
            first = self._queue.get()
            if first is None:
                return
            block_size = first[0]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w") as file:
                num_bytes = file.write(header_line(block_size))
                item: tuple[int, TraceRequest] | None = first
                while item is not None:
                    # Replicas of another block size, if there are any, would need a file of their own.
                    if item[0] == block_size:
                        num_bytes += file.write(request_line(item[1]))
                    if num_bytes > self._max_bytes:
                        log.warning("trace %s has %d bytes: recording ends", self.path, num_bytes)
                        break
                    if self._queue.empty():
                        file.flush()
                    item = self._queue.get()
        except OSError:
            log.exception("requests are no longer recorded to %s", self.path)
        finally:
            self._has_ended = True
            while not self._queue.empty():  # nobody reads it any more
                self._queue.get()
