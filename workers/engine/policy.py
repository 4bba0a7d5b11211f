"""Who is served first: a policy gives each request its turn when it is taken up.

The same order decides who is admitted, who is scheduled and, read backwards, who is preempted.
"""

from __future__ import annotations

from typing import Protocol

from workers.engine.config import EngineConfig
from workers.engine.request import EngineRequest

Turn = tuple[int, int]
"""Lower is served first. The last part is the order of arrival, so no two are equal."""


class Policy(Protocol):
    """Orders requests."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The turn of ``request``, the ``arrival``-th taken up. It holds for the request's whole life."""
        ...


class Fcfs:
    """First come, first served."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The order of arrival alone."""
        return (0, arrival)


class Priority:
    """Lowest ``priority`` first; first come, first served among equals."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The request's own priority, then the order of arrival."""
        return (request.priority, arrival)


def make_policy(config: EngineConfig) -> Policy:
    """The policy that ``config`` names."""
    policies: dict[str, Policy] = {"fcfs": Fcfs(), "priority": Priority()}
    return policies[config.policy]
