"""All metric names of the ingress. Counters are moved once a request; gauges are read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.generation import Generation
from router.ingress import Ingress
from workers.brain_messages import Load

_SHORT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_LONG_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_LOAD_GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "shoal_replica_running_requests": ("Requests in the batch", lambda load: load.num_running),
    "shoal_replica_waiting_requests": ("Requests queued at the replica", lambda load: load.num_waiting),
    "shoal_replica_queued_tokens": ("Uncached tokens not yet computed", lambda load: load.num_queued_tokens),
    "shoal_replica_context_tokens": (
        "KV tokens held by running requests",
        lambda load: load.num_context_tokens,
    ),
    "shoal_replica_free_blocks": (
        "KV blocks that can be taken at once",
        lambda load: load.num_free_blocks,
    ),
    "shoal_replica_blocks": ("KV blocks in all", lambda load: load.num_blocks),
    "shoal_replica_kv_waste_ratio": (
        "Share of allocated KV slots without a token",
        lambda load: load.kv_waste,
    ),
    "shoal_replica_step_base_seconds": ("Cost model: a step's fixed part", lambda load: load.cost.base_s),
    "shoal_replica_prefill_token_seconds": (
        "Cost model: one prefill token",
        lambda load: load.cost.per_token_s,
    ),
}
_LOAD_COUNTERS: dict[str, tuple[str, Callable[[Load], float]]] = {
    "shoal_replica_steps": ("Engine steps", lambda load: load.num_steps),
    "shoal_replica_preemptions": ("Preemptions", lambda load: load.num_preemptions),
    "shoal_replica_prompt_tokens": ("Prompt tokens admitted", lambda load: load.num_prompt_tokens),
    "shoal_replica_cached_prompt_tokens": (
        "Prompt tokens found in the prefix cache",
        lambda load: load.num_cached_tokens,
    ),
    "shoal_replica_output_tokens": ("Tokens sampled", lambda load: load.num_output_tokens),
}


class Metrics:
    """The ingress's metrics, in a registry of their own."""

    def __init__(self, ingress: Ingress, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self.http_requests = Counter(
            "shoal_http_requests", "HTTP requests answered", ["route", "status"], registry=self.registry
        )
        self.running = Gauge(
            "shoal_requests_in_flight", "Generations under way", ["model"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "shoal_prompt_tokens", "Prompt tokens of ended requests", ["model"], registry=self.registry
        )
        self.cached_tokens = Counter(
            "shoal_cached_prompt_tokens", "Of those, found in a cache", ["model"], registry=self.registry
        )
        self.output_tokens = Counter(
            "shoal_output_tokens", "Output tokens of ended requests", ["model"], registry=self.registry
        )
        self.first_token_s = Histogram(
            "shoal_time_to_first_token_seconds",
            "From a valid body to its first token",
            ["model"],
            buckets=_SHORT_S,
            registry=self.registry,
        )
        self.token_s = Histogram(
            "shoal_time_per_output_token_seconds",
            "Mean of a request's gaps between tokens",
            ["model"],
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self.request_s = Histogram(
            "shoal_request_seconds",
            "From a valid body to the end",
            ["model"],
            buckets=_LONG_S,
            registry=self.registry,
        )
        self.registry.register(_RouterCollector(ingress))

    def timer(self, model: str) -> GenerationTimer:
        """Begin to measure one generation."""
        return GenerationTimer(self, model, self._clock)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class GenerationTimer:
    """Times of one generation; counts it when it ends, once."""

    __slots__ = ("_clock", "_first_s", "_has_ended", "_metrics", "_model", "_start_s")

    def __init__(self, metrics: Metrics, model: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._model = model
        self._clock = clock
        self._start_s = clock()
        self._first_s: float | None = None
        self._has_ended = False
        metrics.running.labels(model).inc()

    def first_token(self) -> None:
        """Note the first output; later calls change nothing."""
        if self._first_s is None:
            self._first_s = self._clock()

    def end(self, generation: Generation) -> None:
        """Count the generation, however it ended."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, model, end_s = self._metrics, self._model, self._clock()
        num_output = generation.num_output_tokens
        metrics.running.labels(model).dec()
        metrics.prompt_tokens.labels(model).inc(generation.num_prompt_tokens)
        metrics.cached_tokens.labels(model).inc(generation.num_cached_tokens)
        metrics.output_tokens.labels(model).inc(num_output)
        metrics.request_s.labels(model).observe(end_s - self._start_s)
        if self._first_s is not None:
            metrics.first_token_s.labels(model).observe(self._first_s - self._start_s)
            num_gaps = num_output - len(generation.choices)
            if num_gaps > 0:
                tokens_a_choice = num_gaps / len(generation.choices)
                metrics.token_s.labels(model).observe((end_s - self._first_s) / tokens_a_choice)


class _RouterCollector(Collector):
    """Reads router and replica state when asked, so that tokens pay nothing for it."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    def collect(self) -> Iterator[Metric]:
        yield from self._router()
        yield from self._replicas()

    def _router(self) -> Iterator[Metric]:
        placed = CounterMetricFamily("shoal_router_placements", "Requests sent to replicas", labels=["model"])
        tokens = CounterMetricFamily("shoal_router_placed_tokens", "Their tokens", labels=["model"])
        hits = CounterMetricFamily(
            "shoal_router_hit_tokens", "Of those, predicted to be cached", labels=["model"]
        )
        resumed = CounterMetricFamily(
            "shoal_router_resumed_requests", "Placements after a lost replica", labels=["model"]
        )
        dropped = CounterMetricFamily(
            "shoal_router_index_dropped_hashes", "Blocks not noted: the index was full", labels=["model"]
        )
        hashes = GaugeMetricFamily(
            "shoal_router_index_hashes", "Blocks in the prefix index", labels=["model"]
        )
        at_replicas = GaugeMetricFamily(
            "shoal_router_requests_at_replicas", "Engine requests out", labels=["model"]
        )
        for model in self._ingress.models:
            label, replicas = [model.name], model.replicas
            placed.add_metric(label, replicas.counts.num_placed)
            tokens.add_metric(label, replicas.counts.num_tokens)
            hits.add_metric(label, replicas.counts.num_hit_tokens)
            resumed.add_metric(label, replicas.counts.num_resumed)
            dropped.add_metric(label, replicas.index.num_dropped)
            hashes.add_metric(label, replicas.index.num_hashes)
            at_replicas.add_metric(label, replicas.num_placed)
        yield from (placed, tokens, hits, resumed, dropped, hashes, at_replicas)

    def _replicas(self) -> Iterator[Metric]:
        labels = ["model", "replica"]
        streams = [
            (model.name, stream) for model in self._ingress.models for stream in model.replicas.streams
        ]
        is_open = GaugeMetricFamily(
            "shoal_replica_open", "1 while requests can be placed there", labels=labels
        )
        losses = CounterMetricFamily(
            "shoal_replica_lost_streams", "Times its stream broke or stalled", labels=labels
        )
        for model, stream in streams:
            is_open.add_metric([model, stream.replica_id], float(stream.is_open))
            losses.add_metric([model, stream.replica_id], stream.num_losses)
        yield from (is_open, losses)
        for name, (text, read) in _LOAD_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for model, stream in streams:
                if stream.view is not None:
                    gauge.add_metric([model, stream.replica_id], read(stream.view.load))
            yield gauge
        for name, (text, read) in _LOAD_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for model, stream in streams:
                if stream.view is not None:
                    counter.add_metric([model, stream.replica_id], read(stream.view.load))
            yield counter
