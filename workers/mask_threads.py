"""Masks of many grammars at a time, on threads of llguidance's own; the interpreter's lock is free meanwhile."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence

import llguidance

from workers.library_failure import is_failure

log = logging.getLogger("shoal.grammar")

MIN_ROWS = 8
"""With fewer the hand-over costs more than it gains."""


class MaskThreads:
    """Makes the masks of several matchers side by side. For one caller."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        """Start no thread before the first use; with fewer than two there is none ever."""
        self._row_bytes = -(-vocab_size // 32) * 4
        self._num_threads = num_threads
        self._executor: llguidance.LLExecutor | None = None
        self._buffer = ctypes.create_string_buffer(0)

    def masks(self, matchers: Sequence[llguidance.LLMatcher]) -> list[bytes] | None:
        """The next mask of each, perhaps without zeros at the end that its own has; None: ask one by one.

        That is as fast for a few; and where a matcher takes this call along, it then fails alone. One that fails by
        itself says so; what is returned for it means nothing.
        """
        if self._num_threads < 2 or len(matchers) < MIN_ROWS:
            return None
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self._num_threads)
        size = self._row_bytes
        if len(self._buffer) < size * len(matchers):
            self._buffer = ctypes.create_string_buffer(size * len(matchers))
        rows = [(matcher, place) for place, matcher in enumerate(matchers)]
        try:
            self._executor.unsafe_compute_mask_ptr(rows, ctypes.addressof(self._buffer), size, len(rows))
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("llguidance failed while it made %d masks", len(rows))
            self._executor = None
            return None
        made = memoryview(self._buffer)
        return [bytes(made[place * size : (place + 1) * size]) for place in range(len(rows))]


def spare_threads() -> int:
    """Threads for masks beside a brain: half of the host's cores, eight at most.

    They run for a millisecond or so in a step, in which ranks on GPUs need one core each.
    """
    return min(8, (os.cpu_count() or 1) // 2)
