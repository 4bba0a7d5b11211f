"""Which replica a request should go to: ranked candidates, costs in seconds.

A policy is one class, a function of what is passed in and of its own earlier placements; its answer is a
ranking, so that the fallback is part of it. No policy knows a clock, a socket or a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.placement.candidate import KEY_BLOCKS, Candidate, Forecast, Ranked, rendezvous
from router.placement.plain_policies import (
    ConsistentHashPolicy,
    LeastLoadPolicy,
    LongestMatchPolicy,
    PowerOfTwoPolicy,
    RoundRobinPolicy,
)
from router.placement.prefix_policy import PrefixPolicy

__all__ = [
    "KEY_BLOCKS",
    "POLICIES",
    "Candidate",
    "ConsistentHashPolicy",
    "LeastLoadPolicy",
    "LongestMatchPolicy",
    "Policy",
    "PowerOfTwoPolicy",
    "PrefixPolicy",
    "Ranked",
    "RoundRobinPolicy",
    "rendezvous",
]


Costs = Callable[[Sequence[Forecast], int], list[float]]
"""Seconds that each of some places costs all requests together, of so many replicas."""


class Policy(Protocol):
    """Orders candidates for one request, best first. Changes nothing of the candidates."""

    @property
    def costs_s(self) -> Costs | None:
        """How it weighs forecasts, so that requests that wait may move (``router.placement.moving``).

        None: where it puts them they stay.
        """
        ...

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order ``candidates`` for a request of ``num_tokens`` known tokens; the first gets it.

        Args:
            candidates: open replicas, in any order.
            num_tokens: prompt and output tokens known so far.
            key: equal for requests that should gather: a session's, or those whose prompts begin alike.
        """
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "prefix": PrefixPolicy,
    "least-load": LeastLoadPolicy,
    "round-robin": RoundRobinPolicy,
    "power-of-two": PowerOfTwoPolicy,
    "longest-match": LongestMatchPolicy,
    "consistent-hash": ConsistentHashPolicy,
}
"""Names that the settings know; a constant table."""
