"""A rank's loop: take plans off the channel, run them, and as rank 0 answer with their results."""

from __future__ import annotations

import select
import time

import msgspec

from workers.channel.link import BrainLost, connect
from workers.engine.plan import Executor, StepPlan, Waitable

_ASK_AGAIN_S = 0.0001  # below the shortest step of a GPU, and seldom enough to leave the core to others


def serve_steps(executor: Executor, endpoint: str, rank: int, connect_timeout_s: float = 60.0) -> None:
    """Run plans of the brain at ``endpoint`` until it lets go or dies; then close ``executor`` and return.

    While a step is not ``ready`` the next plan is launched behind it, so an executor whose ``launch`` returns
    early never waits for the brain. One that is ``Waitable`` is slept for, any other asked again and again.
    An executor that computes in ``launch`` or in ``collect`` is ready at once and gets plan after plan.

    Raises:
        BrainLost: no brain listened in time. Later, its end is the ordinary way out.
    """
    link = connect(endpoint, rank, connect_timeout_s)
    decoder, encoder = msgspec.msgpack.Decoder(StepPlan), msgspec.msgpack.Encoder()
    waitable = executor if isinstance(executor, Waitable) else None
    num_launched = 0
    try:
        while True:
            while num_launched and executor.ready():
                result = executor.collect()
                num_launched -= 1
                if rank == 0:
                    link.send(encoder.encode(result))
            payload = link.receive(None if num_launched == 0 else 0.0)
            if payload is not None:
                executor.launch(decoder.decode(payload))
                num_launched += 1
            elif waitable is not None:
                _wait(*link.filenos(), waitable.fileno())
            else:
                time.sleep(_ASK_AGAIN_S)
    except BrainLost:
        return
    finally:
        link.close()
        executor.close()


def _wait(*fds: int) -> None:
    """Sleep until one can be read."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll()
