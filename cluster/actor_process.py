"""The process of an actor that cannot answer yet: Ray's table of actors names it as soon as one is chosen.

One that is stopped while its code is imported answers nobody, and Ray waits for it for ever.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from ray._private import state  # the public way, ray.util.state, asks a dashboard, which need not run

_PERIOD_S = 0.2


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
