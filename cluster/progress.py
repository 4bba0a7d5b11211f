"""Health means progress: a replica is stuck when work waits and no step ends, whatever its sockets say."""

from __future__ import annotations

from workers.engine.config import EngineConfig
from workers.engine.cost_model import CostModel

_TIMES_EXPECTED = 20
"""A step that takes so much longer than the longest that is expected will not end: a busy host slows it by less."""
_LEAST_S = 10.0
"""No step counts as stuck sooner: a kernel may be compiled in it, whose shape no step had before."""


def stall_limit_s(cost: CostModel, limits: EngineConfig, at_most_s: float) -> float:
    """Return how long work may wait without a step ending, given what the largest step is expected to take."""
    longest_s = cost.step_s(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.num_blocks * limits.block_size,
        limits.max_num_batched_tokens * limits.max_model_len,
    )
    return min(at_most_s, max(_LEAST_S, _TIMES_EXPECTED * longest_s))


class ProgressMonitor:
    """Judges signs of life; time comes in as an argument.

    Two clocks: when the brain last answered, and when its step count last moved while it had work.
    """

    def __init__(self, stall_timeout_s: float, now_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._answered_s = now_s
        self._progress_s = now_s
        self._num_steps = 0

    def on_answer(self, num_steps: int, has_work: bool, now_s: float) -> None:
        """The brain answered: so many steps have ended since its start."""
        self._answered_s = now_s
        if num_steps != self._num_steps or not has_work:
            self._progress_s = now_s
            self._num_steps = num_steps

    def complaint(self, now_s: float) -> str | None:
        """What is wrong, or None."""
        silent_s = now_s - self._answered_s
        if silent_s > self._stall_timeout_s:
            return f"the engine has not answered for {silent_s:.0f} s"
        stuck_s = now_s - self._progress_s
        if stuck_s > self._stall_timeout_s:
            return f"work waits and no step has ended for {stuck_s:.0f} s"
        return None
