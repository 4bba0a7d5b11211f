"""What a policy learns of the traffic from the requests that it places and from replicas' counters: no clock.

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
LATE_MEANS = 4.0
"""Mean starts up to which none is late: where all requests are alike, the last percent is no tail."""
MOST_BUSY = 0.9
"""Utilization taken for the worst: beyond it the formulas of a steady state say nothing."""


class Traffic:
    """Running averages over the last placements."""

    __slots__ = (
        "_busy_share",
        "_num_cached",
        "_num_placed",
        "_num_prompt",
        "_start_s",
        "_tail_s",
        "_totals",
        "_work_s",
    )

    def __init__(self) -> None:
        self._num_placed = 0
        self._busy_share = 0.0
        self._totals = (0, 0)
        self._num_prompt = 0.0
        self._num_cached = 0.0
        self._work_s = 0.0
        self._start_s = 0.0
        self._tail_s = 0.0
        """Start that ``LATE_SHARE`` of the requests beat (stochastic approximation, Robbins & Monro 1951)."""

    @property
    def late_s(self) -> float:
        """Start beyond which a request is late."""
        return max(self._tail_s, LATE_MEANS * self._start_s)

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that replicas found cached, whoever placed the requests."""
        return min(self._num_cached / self._num_prompt, 1.0) if self._num_prompt else 0.0

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
        hit_share = self.hit_share
        return hit_share / max(1 - hit_share, 1 - MOST_BUSY)

    def note(self, busy_share: float, start_s: float, work_s: float, totals: tuple[int, int]) -> None:
        """Take in one placement.

        Args:
            busy_share: of the replicas, those that had prefill work when the request came.
            start_s: predicted, where it went.
            work_s: to compute the request there.
            totals: prompt tokens of admitted requests, and those found cached, of all replicas since their start.
        """
        self._num_placed += 1
        rate = 1 / min(self._num_placed, MEMORY)
        is_beyond = start_s > self._tail_s
        self._tail_s += LATE_STEP * self._work_s * (LATE_SHARE - (not is_beyond))
        self._start_s += rate * (start_s - self._start_s)
        self._busy_share += rate * (busy_share - self._busy_share)
        self._work_s += rate * (work_s - self._work_s)
        num_prompt, num_cached = totals[0] - self._totals[0], totals[1] - self._totals[1]
        self._totals = totals
        if num_prompt > 0 and num_cached >= 0:  # totals fall when a replica leaves
            keep = 1 - 1 / MEMORY
            self._num_prompt = keep * self._num_prompt + num_prompt
            self._num_cached = keep * self._num_cached + num_cached
