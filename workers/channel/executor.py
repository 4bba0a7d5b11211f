"""The brain's executor: plans to a group of ranks over a step channel, results of rank 0 back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from workers.channel.link import listen
from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan, StepResult


class ChannelExecutor:
    """Runs plans on the ranks at the other end of ``endpoint``. An ``Executor`` that can be polled."""

    def __init__(self, endpoint: str, num_ranks: int) -> None:
        """Listen; ranks connect with ``serve_steps``, and ``wait_for_ranks`` lets them in."""
        self._link = listen(endpoint, num_ranks)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._results: deque[StepResult] = deque()

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Return once all ranks are connected; raise ``RankLost`` if they are not in time."""
        self._link.wait_for_ranks(timeout_s)

    def launch(self, plan: StepPlan) -> None:
        """Send the plan to all ranks; wait where one leaves no room for it. Others see to one that hangs."""
        self._send(plan)

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """The result of the oldest plan launched and not yet collected.

        Raises:
            RankLost: a rank died, or nothing came within ``timeout_s``.
        """
        if not self._results and not self._receive(timeout_s):
            raise RankLost(f"rank 0 gave no result within {timeout_s:g} s")
        return self._results.popleft()

    def ready(self) -> bool:
        """True if ``collect`` would not wait; raises ``RankLost`` as soon as a rank is gone, work or none."""
        return bool(self._results) or self._receive(0.0)

    def ready_in_s(self) -> float | None:
        """None: only ``fileno`` tells when there is a result."""
        return None

    def filenos(self) -> tuple[int, ...]:
        """Readable when ``ready`` may have changed its answer; poll them only after ``ready`` said no."""
        return self._link.filenos()

    def close(self) -> None:
        """Let the ranks go. Safe to call twice."""
        self._link.close()

    def _send(self, plan: StepPlan, look: Callable[[], None] | None = None) -> None:
        """See ``BrainLink.broadcast``."""
        self._link.broadcast(self._encoder.encode(plan), look)

    def _receive(self, timeout_s: float | None) -> bool:
        payload = self._link.receive(timeout_s)
        if payload is None:
            return False
        self._results.append(self._decoder.decode(payload))
        return True
