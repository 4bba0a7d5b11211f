"""Which steps a traced request had a part in: the first ones and the longest ones, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop

NUM_FIRST = 8
"""Steps of the beginning that are kept: prefill, and how decoding sets in."""
NUM_LONGEST = 24
"""Of the others, the longest: where a stream stood still. A trace stays small beside its collector's limits."""


@dataclass(frozen=True, slots=True, order=True)
class LoggedStep:
    """One step's output as the ingress saw it; times on the event loop's clock. Ordered by length."""

    length_s: float
    """Since the request's output before, or since it was placed."""
    end_s: float
    index: int
    """Outputs of the request before this one."""
    num_tokens: int
    num_running: int
    """Requests that the replica ran beside it, itself included."""
    num_waiting: int


class StepLog:
    """Keeps at most ``NUM_FIRST + NUM_LONGEST`` steps of one choice."""

    __slots__ = ("_first", "_longest", "_num_steps", "_previous_s")

    def __init__(self, start_s: float) -> None:
        self._previous_s = start_s
        self._num_steps = 0
        self._first: list[LoggedStep] = []
        self._longest: list[LoggedStep] = []

    @property
    def num_steps(self) -> int:
        """All that there were."""
        return self._num_steps

    @property
    def steps(self) -> Sequence[LoggedStep]:
        """Those that were kept, in order of time."""
        return sorted([*self._first, *self._longest], key=lambda step: step.index)

    def note(self, now_s: float, num_tokens: int, num_running: int, num_waiting: int) -> None:
        """An output has come."""
        length_s, self._previous_s = now_s - self._previous_s, now_s
        step = LoggedStep(length_s, now_s, self._num_steps, num_tokens, num_running, num_waiting)
        self._num_steps += 1
        if len(self._first) < NUM_FIRST:
            self._first.append(step)
        elif len(self._longest) < NUM_LONGEST:
            heappush(self._longest, step)
        else:
            heappushpop(self._longest, step)
