"""Policies to compare with, each a few lines: what other routers do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.placement.candidate import Candidate, Ranked, forecast, rendezvous

MOST_OVER_MEAN = 1.25
"""Share of the mean load that a replica may have before its keys spill over (1 + epsilon of the paper)."""


class RoundRobinPolicy:
    """Sends requests to one replica after the other."""

    costs_s = None

    def __init__(self) -> None:
        self._turn = 0

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by replica id, starting one further than the last time."""
        ordered = sorted(candidates, key=lambda c: c.view.replica_id)
        first = self._turn % len(ordered) if ordered else 0
        self._turn += 1
        return _with_costs(ordered[first:] + ordered[:first], num_tokens)


class LeastLoadPolicy:
    """Sends a request where the fewest others are; blind to caches."""

    costs_s = None

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by running, waiting and booked requests, then by queued tokens."""
        return _with_costs(sorted(candidates, key=_load), num_tokens)


class PowerOfTwoPolicy:
    """Draws two replicas and takes the less loaded one (Mitzenmacher 2001)."""

    costs_s = None

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order the two drawn by load, then all others by load."""
        ordered = sorted(candidates, key=_load)
        drawn = set(self._random.sample(range(len(ordered)), min(2, len(ordered))))
        others = (i for i in range(len(ordered)) if i not in drawn)
        return _with_costs([ordered[i] for i in (*sorted(drawn), *others)], num_tokens)


class LongestMatchPolicy:
    """Sends a request where most of it is cached, however long the queue there.

    A trap, kept to compare with: where all prompts begin alike, all requests go to one replica.
    """

    costs_s = None

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by tokens held, then by load."""
        return _with_costs(sorted(candidates, key=lambda c: (-c.num_hit_tokens, *_load(c))), num_tokens)


class ConsistentHashPolicy:
    """Sends prompts that begin alike to the same replica, within bounds of load.

    Rendezvous hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam 2018): a replica that has more than
    its share of the requests is passed over.
    """

    costs_s = None

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by rendezvous hash of ``key``; replicas with too many requests come last, the emptiest first."""
        num_requests = 1 + sum(c.view.num_sequences for c in candidates)
        limit = MOST_OVER_MEAN * num_requests / max(1, len(candidates))
        within = [c for c in candidates if c.view.num_sequences + 1 <= max(1.0, limit)]
        beyond = [c for c in candidates if c.view.num_sequences + 1 > max(1.0, limit)]
        within.sort(key=lambda c: rendezvous(key, c.view.replica_id), reverse=True)
        return _with_costs(within + sorted(beyond, key=_load), num_tokens)


def _load(candidate: Candidate) -> tuple[int, int, str]:
    view = candidate.view
    return view.num_sequences, view.num_queued_tokens, view.replica_id


def _with_costs(ordered: Sequence[Candidate], num_tokens: int) -> list[Ranked]:
    forecasts = [forecast(candidate, num_tokens) for candidate in ordered]
    return [Ranked(one, told.start_s, told) for one, told in zip(ordered, forecasts, strict=True)]
