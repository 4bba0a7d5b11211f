"""A rank in this process, and what becomes of it when one of its steps is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan, StepResult
from workers.model.rank import Rank


def cut_off_by(error: BaseException) -> str:
    """What is told from now on where ``error`` has left half a step."""
    return f"{type(error).__name__} cut a step off: make another LLM and give it the prompts again"


class OwnRank:
    """An ``Executor``: the rank as it is, until an exception cuts a step off, whose half its state then holds.

    Such are a second Ctrl-C, what another signal's handler raises, and errors of the device.
    """

    def __init__(self, rank: Rank) -> None:
        """Run plans on ``rank``, which is ready for them and is closed by ``close``."""
        self.rank = rank
        self._loss: str | None = None

    def launch(self, plan: StepPlan) -> None:
        """See ``Executor``."""
        with self._undivided():
            self.rank.launch(plan)

    def collect(self) -> StepResult:
        """See ``Executor``."""
        with self._undivided():
            return self.rank.collect()

    def ready(self) -> bool:
        """See ``Executor``."""
        return self.rank.ready()

    def close(self) -> None:
        """See ``Executor``."""
        self.rank.close()

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        if self._loss is not None:
            raise RankLost(self._loss)
        try:
            yield
        except BaseException as error:
            self._loss = cut_off_by(error)
            raise
