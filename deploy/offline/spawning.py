"""What comes of ranks being spawned: each imports the program's main module again, and hears what its terminal sends.

Knows no models and no channel.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from workers.engine.errors import InvalidRequest

_NAME = "shoal-rank-"
_UNGUARDED = 78
"""Exit code of a rank that came upon its own start: EX_CONFIG of sysexits.h, which no interpreter gives."""


def rank_name(rank: int) -> str:
    """What the process of a rank is called: it tells ranks from processes that the program itself has spawned."""
    return f"{_NAME}{rank}"


def refuse_in_import(num_ranks: int) -> None:
    """Return if this process may start others: it is not about to import, as a spawned one, the program's main module.

    A rank ends here without a word; ``raise_if_unguarded`` tells it once, in the process that started them.

    Raises:
        InvalidRequest: it may not, and is no rank.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # what multiprocessing itself asks before it spawns
        return
    if process.name.startswith(_NAME):
        raise SystemExit(_UNGUARDED)
    raise _unguarded(num_ranks)


def raise_if_unguarded(processes: Sequence[BaseProcess]) -> None:
    """Return if none of these ranks, which have ended, had ended in ``refuse_in_import``.

    Raises:
        InvalidRequest: one had.
    """
    if any(process.exitcode == _UNGUARDED for process in processes):
        raise _unguarded(len(processes)) from None


@contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Have processes that are started meanwhile hear no SIGINT before ``leave_interrupts_to_parent``.

    One that comes to this thread meanwhile strikes at the end. A rank imports for seconds before its own code runs, and
    would tell by a traceback where Ctrl-C has broken that off.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_parent() -> None:
    """In a rank: Ctrl-C reaches the whole group, and the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops the one that was held back, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _unguarded(num_ranks: int) -> InvalidRequest:
    return InvalidRequest(
        f"an LLM with tensor_parallel_size {num_ranks} starts processes that import the program again, and this one "
        'makes it while it is imported: put what the program does under `if __name__ == "__main__":`',
        "tensor_parallel_size",
    )
