"""What a policy learns of the traffic from the requests that it places: no clock, no settings.

Arrivals see time averages (Wolff 1982, "Poisson arrivals see time averages"): the share of replicas that a new
request finds with prefill work is the share of time that they spend on it. With the mean work of a request it
gives the rate of arrivals, in requests a second of one replica, whoever else places requests there.
"""

from __future__ import annotations

MEMORY = 256
"""Placements over which figures are averaged; the first ones count by their number."""
MOST_BUSY = 0.9
"""Utilization taken for the worst: beyond it the formulas of a steady state say nothing."""


class Traffic:
    """Running averages over the last placements."""

    __slots__ = ("_busy_share", "_hit_share", "_num_placed", "_work_s")

    def __init__(self) -> None:
        self._num_placed = 0
        self._busy_share = 0.0
        self._hit_share = 0.0
        self._work_s = 0.0

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

    def note(self, busy_share: float, work_s: float, hit_share: float) -> None:
        """Take in one placement.

        Args:
            busy_share: of the replicas, those that had prefill work when the request came.
            work_s: to compute the request where it went.
            hit_share: of the request's tokens, those cached where it went.
        """
        self._num_placed += 1
        rate = 1 / min(self._num_placed, MEMORY)
        self._busy_share += rate * (busy_share - self._busy_share)
        self._work_s += rate * (work_s - self._work_s)
        self._hit_share += rate * (hit_share - self._hit_share)
