"""Which replica a request should go to: ranked candidates, costs in seconds.

Pure functions of what is passed in. A policy is one class; its answer is a ranking, so that the fallback
is part of it. ``PrefixPolicy`` predicts when the first token could be sampled:

    queued tokens + own bookings + this request's uncached tokens, prefilled in steps of the token budget,
    each step with the decodes that run beside it, after a seat in the batch is free

all through the cost model that the replica itself fits. Replicas whose costs are nearly equal are ordered by
rendezvous hashing (Thaler & Ravishankar 1998) of the prompt's leading blocks: cold requests with a common
prefix then gather at one replica, whichever ingress places them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from router.placement.replica_view import ReplicaView

NEARLY_EQUAL = 0.1
"""Costs within this share of the least count as equal: the cost model's own error is of that order."""
KEY_BLOCKS = 4
"""Leading blocks that siblings must share to gather while nothing is cached (64 tokens)."""
EXPECTED_OUTPUT_TOKENS = 128
"""Length after which a running request is guessed to free its seat."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as a place for one request."""

    view: ReplicaView
    num_hit_tokens: int
    """Tokens of the request that the replica holds, or is about to."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with its predicted cost; the first of a ranking is the choice."""

    candidate: Candidate
    cost_s: float


class Policy(Protocol):
    """Orders candidates for one request, best first. Changes nothing of the candidates."""

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order ``candidates`` for a request of ``num_tokens`` known tokens.

        Args:
            candidates: open replicas, in any order.
            num_tokens: prompt and output tokens known so far.
            key: digest of the prompt's leading blocks, equal for siblings.
        """
        ...


def start_s(candidate: Candidate, num_tokens: int) -> float:
    """Predicted seconds until ``candidate`` could sample the request's next token."""
    view = candidate.view
    load, shape, cost = view.load, view.shape, view.load.cost
    num_uncached = max(1, num_tokens - candidate.num_hit_tokens)
    num_prefill = view.num_queued_tokens + num_uncached
    num_steps = -(-num_prefill // max(1, shape.max_num_batched_tokens))
    num_decodes = min(view.num_sequences, shape.max_num_seqs)
    decode_s = cost.step_s(num_decodes, 0, load.num_context_tokens)
    seats_missing = view.num_sequences + 1 - shape.max_num_seqs
    seat_s = 0.0
    if seats_missing > 0:
        seat_s = seats_missing * decode_s * EXPECTED_OUTPUT_TOKENS / max(1, shape.max_num_seqs)
    return seat_s + cost.prefill_s(num_prefill) + num_steps * decode_s


def rendezvous(key: bytes, replica_id: str) -> bytes:
    """Weight of a replica for a key; the greatest wins, and stays so when others come and go."""
    return blake2b(key + replica_id.encode(), digest_size=8).digest()


class PrefixPolicy:
    """Sends a request where it is predicted to start soonest."""

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by predicted start; nearly equal ones by rendezvous hash of ``key``."""
        ranked = sorted((Ranked(c, start_s(c, num_tokens)) for c in candidates), key=_by_cost)
        if len(ranked) < 2:
            return ranked
        limit = ranked[0].cost_s * (1 + NEARLY_EQUAL)
        num_equal = sum(r.cost_s <= limit for r in ranked)
        if num_equal > 1:
            ranked[:num_equal] = sorted(
                ranked[:num_equal], key=lambda r: rendezvous(key, r.candidate.view.replica_id), reverse=True
            )
        return ranked


class LeastLoadPolicy:
    """Sends a request where the fewest others are; blind to caches."""

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by running, waiting and booked requests, then by queued tokens."""
        ordered = sorted(
            candidates, key=lambda c: (c.view.num_sequences, c.view.num_queued_tokens, c.view.replica_id)
        )
        return [Ranked(c, start_s(c, num_tokens)) for c in ordered]


class RoundRobinPolicy:
    """Sends requests to one replica after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by replica id, starting one further than the last time."""
        ordered = sorted(candidates, key=lambda c: c.view.replica_id)
        first = self._turn % len(ordered) if ordered else 0
        self._turn += 1
        return [Ranked(c, start_s(c, num_tokens)) for c in ordered[first:] + ordered[:first]]


POLICIES: dict[str, Callable[[], Policy]] = {
    "prefix": PrefixPolicy,
    "least-load": LeastLoadPolicy,
    "round-robin": RoundRobinPolicy,
}
"""Names that the settings know; a constant table."""


def _by_cost(ranked: Ranked) -> float:
    return ranked.cost_s
