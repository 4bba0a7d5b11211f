"""What a policy learns of the traffic from the requests that it places: no clock, no settings.

Arrivals see time averages (Wolff 1982, "Poisson arrivals see time averages"): the share of replicas that a new
request finds with prefill work is the share of time that they spend on it. With the mean work of a request it
gives the rate of arrivals, in requests a second of one replica, whoever else places requests there.
"""

from __future__ import annotations

MEMORY = 256
"""Placements over which figures are averaged; the first ones count by their number."""
LATE_SHARE = 0.985
"""Share of requests that start before one counts as late: a little short of the 99th percentile, by which
services are judged."""
LATE_STEP = 0.25
"""How far the bound of lateness moves with one placement, in mean work."""
MOST_BUSY = 0.9
"""Utilization taken for the worst: beyond it the formulas of a steady state say nothing."""


class Traffic:
    """Running averages over the last placements."""

    __slots__ = ("_busy_share", "_hit_share", "_late_s", "_num_placed", "_work_s")

    def __init__(self) -> None:
        self._num_placed = 0
        self._busy_share = 0.0
        self._hit_share = 0.0
        self._work_s = 0.0
        self._late_s = 0.0

    @property
    def late_s(self) -> float:
        """Start that ``LATE_SHARE`` of the requests beat (stochastic approximation, Robbins & Monro 1951)."""
        return self._late_s

    @property
    def hit_share(self) -> float:
        """Share of tokens that were cached where requests went."""
        return self._hit_share

    @property
    def utilization(self) -> float:
        """Share of time that a replica has prefill work, at most ``MOST_BUSY``."""
        return min(self._busy_share, MOST_BUSY)

    @property
    def arrivals_per_s(self) -> float:
        """Requests a second that come to one replica, on average."""
        return self.utilization / self._work_s if self._work_s else 0.0

    @property
    def hits_per_computed_token(self) -> float:
        """How often a token that was computed is found again before it is evicted, on average."""
        return self._hit_share / max(1 - self._hit_share, 1 - MOST_BUSY)

    def note(self, busy_share: float, start_s: float, work_s: float, hit_share: float) -> None:
        """Take in one placement.

        Args:
            busy_share: of the replicas, those that had prefill work when the request came.
            start_s: predicted, where it went.
            work_s: to compute the request there.
            hit_share: of the request's tokens, those cached where it went.
        """
        self._num_placed += 1
        rate = 1 / min(self._num_placed, MEMORY)
        is_late = start_s > self._late_s
        self._late_s += LATE_STEP * self._work_s * (LATE_SHARE - (not is_late))
        self._busy_share += rate * (busy_share - self._busy_share)
        self._work_s += rate * (work_s - self._work_s)
        self._hit_share += rate * (hit_share - self._hit_share)
