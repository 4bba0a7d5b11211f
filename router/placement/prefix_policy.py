"""Places each request where it costs all requests together the least time to first token.

A cost has four parts, all in seconds:

*own*: when the request is predicted to start there (``forecast``), with what copies from host memory take; they
hold nobody else up.

*evicted*: tokens that are computed displace cached ones, each of which would have been found again a number
of times before its end. So work costs once more its own length times that number.

*harm*: what the request makes later ones wait. Requests that are bound to a replica by what it holds come at
a rate ``l`` and wait behind everything there. Work ``x`` after a backlog ``w`` costs them ``l x (w + x/2)``
while it lasts, and ``1 / (1 - utilization)`` times that until the backlog has drained (Hyytiä, Penttinen &
Aalto 2012, "Size- and state-aware dispatching problem with queue-specific job sizes": one step of policy
iteration). Requests that are bound nowhere go to the smallest backlog ``b`` of all, which drains in
``b`` seconds: they wait ``L b^2 / 2`` together. A short request is hardly touched by either; long ones stack
up behind each other rather than take the last idle replica.

*lateness*: a start beyond what nearly all requests get costs its excess many times over. The other parts make
the mean small, this one keeps the tail short.

Hit share, utilization, rates and the bound of lateness are learned from the placements themselves
(``Traffic``). Replicas whose costs are nearly equal are ordered by rendezvous hashing of a key, the request's session
or its prompt's leading blocks: cold requests with a common prefix then gather at one replica, whichever ingress places
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from router.placement.candidate import Candidate, Forecast, Ranked, forecast, rendezvous
from router.placement.traffic import Traffic

NEARLY_EQUAL = 0.02
"""Costs count as equal if they differ by less than this share of the predicted start; up to 0.1, mean times on
recorded traffic move by less than 1 %."""
LATE_WEIGHT = 20.0
"""Cost of a second beyond the bound of lateness; on recorded traffic 10 to 50 give the same times."""


class PrefixPolicy:
    """Weighs an early start against what it costs the cache and later requests."""

    def __init__(self) -> None:
        self._traffic = Traffic()

    def rank(self, candidates: Sequence[Candidate], num_tokens: int, key: bytes) -> list[Ranked]:
        """Order by cost; nearly equal ones by rendezvous hash of ``key``."""
        if not candidates:
            return []
        forecasts = [forecast(candidate, num_tokens) for candidate in candidates]
        costs = self.costs_s(forecasts, len(forecasts))
        cheapest = min(range(len(costs)), key=costs.__getitem__)
        limit = costs[cheapest] + NEARLY_EQUAL * forecasts[cheapest].start_s
        order = sorted(range(len(costs)), key=lambda i: _place(costs[i], limit, key, candidates[i]))
        ranked = [Ranked(candidates[i], costs[i], forecasts[i]) for i in order]
        best = order[0]
        self._traffic.note(
            busy_share=sum(candidate.view.is_prefilling for candidate in candidates) / len(candidates),
            start_s=forecasts[best].start_s,
            work_s=forecasts[best].work_s,
            totals=(
                sum(candidate.view.load.num_prompt_tokens for candidate in candidates),
                sum(candidate.view.load.num_cached_tokens for candidate in candidates),
            ),
        )
        return ranked

    def costs_s(self, forecasts: Sequence[Forecast], num_replicas: int) -> list[float]:
        """Cost of each place, given what is predicted there and at the others, the least busy of all replicas."""
        traffic = self._traffic
        least, second = nsmallest(2, [*(one.wait_s for one in forecasts), inf])
        evicted, late_s = traffic.hits_per_computed_token, traffic.late_s
        bound, rate = traffic.hit_share, traffic.arrivals_per_s
        bound_harm = bound * rate / (1 - traffic.utilization)
        free_harm = (1 - bound) * rate * num_replicas / 2
        costs = []
        for wait_s, copy_s, work_s in forecasts:
            start_s = wait_s + copy_s + work_s
            least_s = min(
                start_s, second if wait_s <= least else least
            )  # the smallest backlog, with this request
            costs.append(
                start_s
                + evicted * work_s
                + bound_harm * work_s * (wait_s + work_s / 2)
                + free_harm * least_s * least_s
                + LATE_WEIGHT * max(0.0, start_s - late_s)
            )
        return costs


def _place(cost_s: float, limit: float, key: bytes, candidate: Candidate) -> tuple[float, int]:
    """Sorting key: within ``limit`` by weight for ``key``, beyond it by cost."""
    if cost_s > limit:
        return cost_s, 0
    return 0.0, -int.from_bytes(rendezvous(key, candidate.view.replica_id), "big")
