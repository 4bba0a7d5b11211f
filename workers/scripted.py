"""An executor without a model: a token a step for each sampling row, by a cheap formula.

It ships with the package as httpx ships its mock transport: tests of the cluster and benchmarks of the path
around the model drive the real engine with it.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable

from workers.engine.plan import StepPlan, StepResult, TokenLogprobs
from workers.engine.request import ChoiceParams

_MIX = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, as in Fibonacci hashing


def scripted_token(seed: int, choice_index: int, position: int, vocab_size: int) -> int:
    """The token at ``position`` of a scripted choice: it depends on nothing else."""
    mixed = ((seed * 31 + choice_index + 1) * _MIX + position * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 33) % vocab_size


class ScriptedExecutor:
    """Answers each plan ``step_s`` after the one before it, or at once. Masks are not looked at."""

    def __init__(
        self,
        vocab_size: int = 32000,
        step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._params: dict[int, ChoiceParams] = {}
        self._results: deque[tuple[float, StepResult]] = deque()
        self._last_due_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        """Decide the plan's tokens; they are due when its step time has passed."""
        self._params |= {one.row: self._params[one.source] for one in plan.branches}
        for new_row in plan.new_rows:
            self._params[new_row.row] = new_row.params
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        pooled: list[bytes | None] = []
        for row, position in plan.sampled_positions:
            params = self._params[row]
            token_id = scripted_token(params.seed, params.choice_index, position, self._vocab_size)
            token_ids.append(token_id)
            logprobs.append(self._logprobs_of(token_id, params))
            pooled.append(struct.pack("<4f", position, 1, 2, 3) if params.pooling else None)
        told = logprobs if any(entry is not None for entry in logprobs) else None
        self._last_due_s = max(self._clock(), self._last_due_s) + self._step_s
        vectors = pooled if any(pooled) else None
        self._results.append(
            (self._last_due_s, StepResult(plan.step_id, token_ids, told, self._step_s, vectors))
        )

    def collect(self) -> StepResult:
        """The oldest result, once it is due."""
        wait_s = self.ready_in_s()
        assert wait_s is not None, "collect() without a launched plan"
        if wait_s > 0:
            self._sleep(wait_s)
        return self._results.popleft()[1]

    def ready(self) -> bool:
        """True if ``collect`` would not wait."""
        return self.ready_in_s() == 0.0

    def ready_in_s(self) -> float | None:
        """Seconds until ``ready``; None if nothing is launched."""
        if not self._results:
            return None
        return max(0.0, self._results[0][0] - self._clock())

    def filenos(self) -> tuple[int, ...]:
        """Nothing to poll: ``ready_in_s`` says it all."""
        return ()

    def close(self) -> None:
        """Forget what was launched."""
        self._results.clear()

    def _logprobs_of(self, token_id: int, params: ChoiceParams) -> TokenLogprobs | None:
        """Made-up numbers of the right shape: the sampled token and its neighbours, each half as likely."""
        if params.num_logprobs is None:
            return None
        ranks = range(params.num_logprobs)
        top_token_ids = [(token_id + rank) % self._vocab_size for rank in ranks]
        return TokenLogprobs(-0.7, top_token_ids, [-0.7 * (rank + 1) for rank in ranks])
