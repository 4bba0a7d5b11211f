"""What passes between a simulated ingress and a simulated replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from router.trace_lines import TraceRequest
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


class Begun(NamedTuple):
    """A request that had its first token."""

    request_id: str
    num_cached_tokens: int
    """Of its prompt, found in the cache."""
    num_host_cached_tokens: int = 0
    """Of those, brought back from host memory."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells all ingresses after a step."""

    load: Load
    events: CacheEvents | None
    begun: list[Begun]
    ended: list[str]
