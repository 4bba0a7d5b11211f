"""The channel to ranks that are children of this process: none outlives another, or its parent's use of it."""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess

import psutil

from workers.channel.executor import ChannelExecutor
from workers.engine.errors import RankLost
from workers.engine.plan import StepPlan, StepResult
from workers.model.rendezvous import forget_rendezvous

_LOOK_S = 1.0
"""With no result for so long, processes are looked at."""
_REAP_S = 0.2
"""For a process that has hung up to be gone."""
_END_S = 10.0
"""For ranks that were let go to give their memory back by themselves."""


class OwnedRanks(ChannelExecutor):
    """Runs plans on ranks whose processes it ends: with ``close``, or all at once when one is lost."""

    def __init__(
        self, endpoint: str, num_ranks: int, processes: Sequence[BaseProcess], rendezvous: str
    ) -> None:
        """Listen at ``endpoint``; ``processes`` in the order of ranks, some of which may be added later."""
        super().__init__(endpoint, num_ranks)
        self._processes = processes
        self._rendezvous = rendezvous
        self._loss: str | None = None

    def launch(self, plan: StepPlan) -> None:
        """See ``ChannelExecutor``."""
        with self._ending_all():
            super().launch(plan)

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """See ``ChannelExecutor``; a rank that is stopped is lost, too."""
        with self._ending_all():
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.ready() and (deadline_s is None or time.monotonic() < deadline_s):
                if not self._wait():
                    self._look()
            return super().collect(0.0)

    def close(self) -> None:
        """Let the ranks go and wait for their end. Safe to call twice."""
        super().close()
        deadline_s = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(deadline_s - time.monotonic(), 0.0))
        self.kill()

    def kill(self) -> None:
        """End all ranks now. One may wait on its device for another that is gone."""
        super().close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        forget_rendezvous(self._rendezvous)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        if self._loss is not None:
            raise RankLost(self._loss)
        try:
            yield
        except RankLost as error:
            num_ranks = len(self._processes)
            what = self._first_ended() or str(error)
            self._loss = (
                f"{what}; all {num_ranks} ranks were ended: make another LLM and give it the prompts again"
            )
            self.kill()
            raise RankLost(self._loss) from error

    def _first_ended(self) -> str | None:
        """Which rank's process has ended by itself and how; None: none has."""
        for rank, process in enumerate(self._processes):
            process.join(_REAP_S)
            if process.exitcode is not None:
                code = process.exitcode
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                why = ", by the kernel if memory ran out" if code == -signal.SIGKILL else ""
                return f"rank {rank} of {len(self._processes)} (process {process.pid}) has ended ({how}{why})"
        return None

    def _wait(self) -> bool:
        """Sleep until there may be a result; False if nothing came for ``_LOOK_S``."""
        poller = select.poll()  # takes descriptors of any number
        for fd in self.filenos():
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(_LOOK_S * 1000))

    def _look(self) -> None:
        for rank, process in enumerate(self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):  # then its end of the channel says so
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    raise RankLost(f"rank {rank} (process {process.pid}) is stopped")
