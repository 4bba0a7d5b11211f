"""The process of an actor that cannot answer yet: Ray's table of actors names it as soon as one is chosen.

One that is stopped while its code is imported answers nobody, and Ray waits for it for ever. One that is stopped
before it has told Ray that it is there is not even in the table: Ray waits for it for a minute
(``worker_register_timeout_seconds``), and would have another at once for another actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state  # the public way, ray.util.state, asks a dashboard, which need not run

logger = logging.getLogger("ray.serve")

_PERIOD_S = 0.2
_NUM_ANEW = 2
"""Times that an actor is made anew. After that it is a machine that takes so long, and all the time it needs."""


@dataclass(frozen=True, slots=True)
class ActorProcess:
    """A process of one of Ray's nodes."""

    node_id: str
    pid: int


async def process_of(actor: Any) -> ActorProcess:
    """Wait until it is known where ``actor`` runs, or will."""
    while True:
        row = await asyncio.to_thread(state.actors, actor._actor_id.hex())
        if row and row["Pid"]:
            return ActorProcess(row["Address"]["NodeID"], row["Pid"])
        await asyncio.sleep(_PERIOD_S)


async def find_process(actor: Any, make: Callable[[], Any], patience_s: float) -> ActorProcess:
    """Wait until it is known where ``actor`` runs, or will; where that takes too long, the same of one made anew.

    Each has twice as long as the one before. A process that was merely slow serves the next one.
    """
    for _ in range(_NUM_ANEW):
        try:
            return await asyncio.wait_for(process_of(actor), patience_s)
        except TimeoutError:
            logger.warning("Ray has no process for a rank after %.0f s: it is asked for another", patience_s)
        ray.kill(actor)
        actor = make()
        patience_s *= 2
    return await process_of(actor)
