"""The channel to ranks that are children of this process: none outlives another, or its parent's use of it."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import select
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

from deploy.offline.held_interrupts import HeldInterrupts, interrupts_held
from workers.channel.executor import ChannelExecutor
from workers.channel.link import LOOK_S
from workers.engine.errors import RankLost, ShoalError
from workers.engine.plan import StepPlan, StepResult
from workers.model.rendezvous import forget_rendezvous
from workers.process_state import ProcessState, process_state

_STOPPED_LOOKS = 2
"""So many that see a rank stopped tell that it is lost: one may come amid the end of a stop that all shared."""
_REAP_S = 0.2
"""For a process that has hung up to be gone."""
_CONNECT_S = 10.0
"""For ranks that are ready to connect, which takes them a millisecond."""
_END_S = 10.0
"""For ranks that were let go to give their memory back by themselves."""


class OwnedRanks(ChannelExecutor):
    """Runs plans on ranks whose processes it ends: with ``close``, or all at once when one is lost or nobody holds it.

    The end of this process is such an end, too, unless it is killed: then ranks see to it themselves.
    Ctrl-C ends them where it has cut a plan off, since the next would be read as the rest of it.
    """

    def __init__(
        self, endpoint: str, num_ranks: int, processes: Sequence[BaseProcess], rendezvous: str
    ) -> None:
        """Listen at ``endpoint``; ``processes`` in the order of ranks, some of which may be added later."""
        super().__init__(endpoint, num_ranks)
        self._processes = processes
        self._rendezvous = rendezvous
        self._num_owed = 0  # results of plans that all ranks have
        self._loss: str | None = None
        self._advice = "load the model again"
        self._stopped_looks: dict[int, int] = {}
        # multiprocessing would end the daemons at exit, but knows no rendezvous. Forked children leave ours alone.
        Finalize(self, _end, (processes, rendezvous), exitpriority=0)

    def hear(self, pipes: Sequence[Connection]) -> list[object]:
        """The next message of each rank, which it may take any time for; text is its error.

        Args:
            pipes: in the order of ranks.

        Raises:
            RankLost: one has ended or is stopped; all were ended.
            ShoalError: one has told an error.
        """
        heard: dict[int, object] = {}
        with self._ending_all():
            while len(heard) < len(pipes):
                self._hear_some({pipe: rank for rank, pipe in enumerate(pipes) if rank not in heard}, heard)
        return [heard[rank] for rank in range(len(pipes))]

    def connect_ranks(self) -> None:
        """Let the ranks in, all of which are ready."""
        with self._ending_all():
            self.wait_for_ranks(_CONNECT_S)
        self._advice = "make another LLM and give it the prompts again"

    def launch(self, plan: StepPlan) -> None:
        """See ``ChannelExecutor``; a rank that is stopped is lost, too.

        Ctrl-C strikes when all ranks have the plan. Where they leave no room for ``LOOK_S`` it strikes amid it,
        and ends them, as does any other exception from a signal's handler. In ``EngineLoop.turn`` it takes two.
        """
        with interrupts_held() as held, self._ending_all():
            try:
                self._send(plan, partial(self._look_for_a_reason, held))
            except RankLost:
                raise
            except BaseException as error:
                self._end_all(f"the sending of a plan was cut off by {type(error).__name__}")
                raise
            self._num_owed += 1

    def ready(self) -> bool:
        """See ``ChannelExecutor``; Ctrl-C takes nothing of a result."""
        with interrupts_held():
            return super().ready()

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """See ``ChannelExecutor``; a rank that is stopped is lost, too.

        Ctrl-C while it waits changes nothing. If one came before a plan was sent, its result is not waited for:
        all ranks are ended.
        """
        with self._ending_all():
            if not self._num_owed:
                raise RankLost("a result was asked for of a plan that an interrupt kept from the ranks")
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.ready() and (deadline_s is None or time.monotonic() < deadline_s):
                if not self._wait():
                    self._look()
            self._num_owed -= 1  # first: one owed too many would be waited for in vain
            result = super().collect(0.0)
            self._stopped_looks.clear()  # a stop is over: the next, however short, is another
            return result

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
        _end(self._processes, self._rendezvous)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        if self._loss is not None:
            raise RankLost(self._loss)
        try:
            yield
        except RankLost as error:
            raise RankLost(self._end_all(self._first_ended() or str(error))) from error

    def _end_all(self, why: str) -> str:
        """End all ranks, and say so to whoever wants something of them from now on."""
        self._loss = f"{why}; all {len(self._processes)} ranks were ended: {self._advice}"
        self.kill()
        return self._loss

    def _hear_some(self, awaited: dict[Connection, int], heard: dict[int, object]) -> None:
        """Take what has come within ``LOOK_S`` of those that are awaited; see ``hear``."""
        ends = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        ready = multiprocessing.connection.wait([*awaited, *ends], LOOK_S)
        if not ready:
            self._look()
        for pipe, rank in awaited.items():
            if pipe in ready:
                with contextlib.suppress(EOFError, OSError):  # its end is seen below
                    heard[rank] = pipe.recv()
        error = next(((rank, told) for rank, told in heard.items() if isinstance(told, str)), None)
        if error is not None and not self._was_one_killed():
            raise ShoalError(f"rank {error[0]} of {len(ends)} could not load the model: {error[1]}")
        lost = [rank for pipe, rank in awaited.items() if pipe in ready and rank not in heard]
        lost += [rank for end, rank in ends.items() if end in ready]
        if lost or error is not None:
            raise RankLost(f"rank {min(lost, default=0)} has ended")

    def _was_one_killed(self) -> bool:
        """Whether a signal has ended a rank: what the others tell then came of that."""
        self._wait_for_ends()
        return any((process.exitcode or 0) < 0 for process in self._processes)

    def _first_ended(self) -> str | None:
        """Which rank's process has ended and how, by a signal rather than by what that did to it; None: none has."""
        self._wait_for_ends()
        ended = [
            (process.exitcode, rank)
            for rank, process in enumerate(self._processes)
            if process.exitcode is not None
        ]
        if not ended:
            return None
        code, rank = min(ended, key=lambda one: (one[0] >= 0, one[1]))
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exit code {code}; its own message stands above"
        )
        why = ", by the kernel if memory ran out" if code == -signal.SIGKILL else ""
        process = self._processes[rank]
        return f"rank {rank} of {len(self._processes)} (process {process.pid}) has ended ({how}{why})"

    def _wait_for_ends(self) -> None:
        """Give processes that have hung up ``_REAP_S`` in all."""
        deadline_s = time.monotonic() + _REAP_S
        for process in self._processes:
            process.join(max(deadline_s - time.monotonic(), 0.0))

    def _wait(self) -> bool:
        """Sleep until there may be a result; False if nothing came for ``LOOK_S``."""
        poller = select.poll()  # takes descriptors of any number
        for fd in self.filenos():
            poller.register(fd, select.POLLIN)
        return bool(poller.poll(LOOK_S * 1000))

    def _look_for_a_reason(self, held: HeldInterrupts) -> None:
        """Raise if there is a reason to wait for room no longer."""
        held.strike()
        self._look()

    def _look(self) -> None:
        for rank, process in enumerate(self._processes):
            assert process.pid is not None, "it was started"
            # The end of one is told by its end of the channel.
            if process_state(process.pid) != ProcessState.STOPPED:
                self._stopped_looks[rank] = 0
                continue
            self._stopped_looks[rank] = self._stopped_looks.get(rank, 0) + 1
            if self._stopped_looks[rank] == _STOPPED_LOOKS:
                raise RankLost(f"rank {rank} (process {process.pid}) is stopped")


def _end(processes: Sequence[BaseProcess], rendezvous: str) -> None:
    """Leave neither processes nor their meeting place. Safe to call twice."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    forget_rendezvous(rendezvous)
