"""How full each of the ingress's caches is, beside its bound: what grows with traffic must be seen to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.ingress import Ingress
from router.ledger import MAX_ENDED
from router.placement.prefix_index import BYTES_PER_HASH
from router.placement.replica_view import MAX_COMING_HASHES
from router.text.grammar_check import MAX_REMEMBERED
from router.trace_recorder import MAX_QUEUED

_DIGEST_BYTES = 16


class _Cache(NamedTuple):
    """One cache as it is now."""

    name: str
    model: str
    """Empty where all models share it."""
    num_entries: int
    max_entries: int
    num_bytes: int


class CacheCollector(Collector):
    """Reads the caches when asked."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        labels = ["cache", "model"]
        entries = GaugeMetricFamily("shoal_cache_entries", "Entries of a cache", labels=labels)
        most = GaugeMetricFamily("shoal_cache_max_entries", "Entries that it may have", labels=labels)
        num_bytes = GaugeMetricFamily(
            "shoal_cache_bytes",
            "Bytes of its entries, where they differ as measured, else estimated",
            labels=labels,
        )
        for cache in self._caches():
            names = [cache.name, cache.model]
            entries.add_metric(names, cache.num_entries)
            most.add_metric(names, cache.max_entries)
            num_bytes.add_metric(names, cache.num_bytes)
        yield from (entries, most, num_bytes)

    def _caches(self) -> Iterator[_Cache]:
        ledger = self._ingress.ledger
        yield _Cache("ended_requests", "", ledger.num_ended, MAX_ENDED, ledger.num_bytes)
        for model in self._ingress.models:
            index, views = model.replicas.index, model.replicas.open_views
            num_hashes = index.num_hashes
            yield _Cache(
                "prefix_index", model.name, num_hashes, index.max_hashes, num_hashes * BYTES_PER_HASH
            )
            num_coming = sum(view.num_coming_hashes for view in views)
            yield _Cache(
                "coming_blocks",
                model.name,
                num_coming,
                MAX_COMING_HASHES * len(views),
                num_coming * BYTES_PER_HASH,
            )
            num_grammars = model.num_grammars
            yield _Cache("grammars", model.name, num_grammars, MAX_REMEMBERED, num_grammars * _DIGEST_BYTES)
            if model.recorder is not None:
                yield _Cache("trace_queue", model.name, model.recorder.num_queued, MAX_QUEUED, 0)
