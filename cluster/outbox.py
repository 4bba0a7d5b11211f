"""What one ingress has not been sent yet.

A step's outputs are merged into the message that still waits, if one does: an ingress that reads slowly
costs memory by the token, not by the step, and catches up in one message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from cluster.proto import shoal_pb2 as pb

MAX_WAITING_MESSAGES = 4096
"""Steps with cache events cannot be merged; an ingress this far behind is cut off and attaches anew."""


class OutboxFull(Exception):
    """The reader is too far behind to be kept."""


class Outbox:
    """A queue of messages with one reader; writers never wait."""

    def __init__(self) -> None:
        self._messages: deque[pb.ReplicaMessage] = deque()
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, message: pb.ReplicaMessage) -> None:
        """Append a message that must keep its place.

        Raises:
            OutboxFull: too many messages wait.
        """
        if len(self._messages) >= MAX_WAITING_MESSAGES:
            raise OutboxFull
        self._messages.append(message)
        self._filled.set()

    def put_step(
        self,
        outputs: list[pb.TokenOutput],
        cache: pb.CacheEvents | None,
        load: pb.Load,
        arrived: Sequence[int] = (),
        kept: Sequence[str] = (),
    ) -> None:
        """Append a step, merged into the last waiting one where the order of cache events allows.

        Raises:
            OutboxFull: too many messages wait.
        """
        last = self._messages[-1] if self._messages else None
        if (
            last is not None
            and last.WhichOneof("kind") == "step"
            and (cache is None or not last.step.HasField("cache"))
        ):
            last.step.outputs.extend(outputs)
            last.step.arrived.extend(arrived)
            last.step.kept.extend(kept)
            last.step.load.CopyFrom(load)
            if cache is not None:
                last.step.cache.CopyFrom(cache)
            return
        step = pb.Step(outputs=outputs, cache=cache, load=load, arrived=arrived, kept=kept)
        self.put(pb.ReplicaMessage(step=step))

    async def get(self) -> pb.ReplicaMessage | None:
        """The next message; None once closed and empty."""
        while not self._messages:
            if self._closed:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()

    def close(self) -> None:
        """Let the reader finish what waits, then end."""
        self._closed = True
        self._filled.set()

    def __len__(self) -> int:
        return len(self._messages)
