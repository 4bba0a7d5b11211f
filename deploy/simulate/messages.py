"""What passes between a simulated ingress and a simulated replica."""

from __future__ import annotations

from dataclasses import dataclass

from router.trace import TraceRequest
from workers.engine.outputs import CacheEvents, Load


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A recorded request under a name."""

    number: int
    """Its place in the trace."""
    traced: TraceRequest

    @property
    def request_id(self) -> str:
        """Its name at the replica."""
        return str(self.number)


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells all ingresses after a step."""

    load: Load
    events: CacheEvents | None
    begun: list[tuple[str, int]]
    """Requests that had their first token, with the prompt tokens found in the cache."""
    ended: list[str]
