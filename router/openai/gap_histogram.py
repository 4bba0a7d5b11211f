"""A histogram that is cheap enough for each token: one bisection and two additions."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Gaps:
    """Counts of one model."""

    __slots__ = ("_bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, gap_s: float) -> None:
        """Count one gap."""
        self.counts[bisect_left(self._bounds, gap_s)] += 1
        self.total_s += gap_s


class GapHistogram(Collector):
    """One histogram with the label ``model``."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(bounds)
        self._children: dict[str, Gaps] = {}

    def child(self, model: str) -> Gaps:
        """The counts of ``model``."""
        found = self._children.get(model)
        if found is None:
            found = self._children[model] = Gaps(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        """The histogram as Prometheus wants it: each bucket holds those before it."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model"])
        edges = [str(float(bound)) if math.isfinite(bound) else "+Inf" for bound in (*self._bounds, math.inf)]
        for model, gaps in list(self._children.items()):
            buckets = list(zip(edges, accumulate(gaps.counts), strict=True))
            family.add_metric([model], buckets, gaps.total_s)
        yield family
