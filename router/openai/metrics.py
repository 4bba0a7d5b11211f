"""All metric names of the ingress. Counters are moved once a request; gauges are read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.engine_metrics import EngineRow, engine_metrics
from router.generation import ABORTED, Generation
from router.ingress import Ingress
from router.openai.cache_metrics import CacheCollector
from router.openai.gap_histogram import GapHistogram
from router.queue_moves import OUTCOMES, REASONS
from router.tenancy.gate import Usage

_SHORT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_LONG_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

VLLM_HISTOGRAMS = {
    "shoal_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "shoal_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "shoal_request_seconds": "vllm:e2e_request_latency_seconds",
}
"""Histograms that vLLM's dashboards read, by our name."""


class Metrics:
    """The ingress's metrics, in a registry of their own."""

    def __init__(self, ingress: Ingress, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.clock = clock
        self._replicas = CollectorRegistry()
        self._replicas.register(_ReplicaCollector(ingress))
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
        self.ended = Counter(
            "shoal_requests", "Choices ended, by how", ["model", "finish_reason"], registry=self.registry
        )
        self.inter_token_s = GapHistogram(
            "shoal_inter_token_seconds", "Between two moments at which a request got tokens", _TOKEN_S
        )
        self.registry.register(self.inter_token_s)
        self.registry.register(_RouterCollector(ingress))
        self.registry.register(CacheCollector(ingress))
        self.registry.register(_UsageCollector(ingress.gate.usage))
        if ingress.config.observability.vllm_metric_names:
            self.registry.register(_VllmNames(self))

    def timer(self, model: str) -> GenerationTimer:
        """Begin to measure one generation."""
        return GenerationTimer(self, model)

    def render(self) -> bytes:
        """All that this ingress knows, its view of the replicas included."""
        return generate_latest(self.registry) + generate_latest(self._replicas)

    def render_own(self) -> bytes:
        """What it alone knows: where replicas tell of themselves, nothing is counted once an ingress."""
        return generate_latest(self.registry)


class GenerationTimer:
    """Times of one generation; counts it when it ends, once."""

    __slots__ = ("_first_s", "_gaps", "_has_ended", "_last_s", "_metrics", "_model", "_start_s")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._gaps = metrics.inter_token_s.child(model)
        self._start_s = metrics.clock()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._has_ended = False
        metrics.running.labels(model).inc()

    @property
    def model(self) -> str:
        """The model's name, as answers carry it."""
        return self._model

    @property
    def duration_s(self) -> float:
        """Since it began."""
        return self._metrics.clock() - self._start_s

    @property
    def first_token_s(self) -> float | None:
        """From its beginning to its first output; None: there was none yet."""
        return None if self._first_s is None else self._first_s - self._start_s

    def on_tokens(self) -> None:
        """Note that tokens came; the first call is the first token."""
        now_s = self._metrics.clock()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps.observe(now_s - self._last_s)
        self._last_s = now_s

    def end(self, generation: Generation) -> None:
        """Count the generation, however it ended."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, model, end_s = self._metrics, self._model, self._metrics.clock()
        num_output = generation.num_output_tokens
        metrics.running.labels(model).dec()
        for choice in generation.choices:
            metrics.ended.labels(model, choice.finish_reason or ABORTED).inc()
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
        placed = CounterMetricFamily("shoal_router_placements", "Requests sent to replicas", labels=["model"])
        tokens = CounterMetricFamily("shoal_router_placed_tokens", "Their tokens", labels=["model"])
        hits = CounterMetricFamily(
            "shoal_router_hit_tokens", "Of those, predicted to be cached", labels=["model"]
        )
        resumed = CounterMetricFamily(
            "shoal_router_resumed_requests", "Placements after a lost replica", labels=["model"]
        )
        moves = CounterMetricFamily(
            "shoal_router_moves",
            "Queued requests asked back from a replica, to start sooner at another",
            labels=["model", "reason", "outcome"],
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
        held = GaugeMetricFamily(
            "shoal_router_held_requests",
            "Requests that wait here for a replica, or for their caller's turn",
            labels=["model"],
        )
        num_open = GaugeMetricFamily(
            "shoal_router_open_replicas", "Replicas that requests can be placed on", labels=["model"]
        )
        for model in self._ingress.models:
            label, replicas = [model.name], model.replicas
            placed.add_metric(label, replicas.counts.num_placed)
            tokens.add_metric(label, replicas.counts.num_tokens)
            hits.add_metric(label, replicas.counts.num_hit_tokens)
            resumed.add_metric(label, replicas.counts.num_resumed)
            for reason, outcome in product(REASONS, OUTCOMES):
                moves.add_metric([*label, reason, outcome], replicas.moves.counts[reason, outcome])
            dropped.add_metric(label, replicas.index.num_dropped)
            hashes.add_metric(label, replicas.index.num_hashes)
            at_replicas.add_metric(label, replicas.num_placed)
            held.add_metric(label, replicas.num_held)
            num_open.add_metric(label, len(replicas.open_views))
        tasks = GaugeMetricFamily("shoal_ingress_tasks", "Asyncio tasks of the ingress process")
        tasks.add_metric([], self._ingress.num_tasks)
        yield tasks
        yield from (placed, tokens, hits, resumed, moves, dropped, hashes, at_replicas, held, num_open)


class _UsageCollector(Collector):
    """What each caller has used of each model."""

    def __init__(self, usage: Mapping[tuple[str, str], Usage]) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        labels = ["tenant", "model"]
        requests = CounterMetricFamily("shoal_tenant_requests", "Requests let in", labels=labels)
        refused = CounterMetricFamily("shoal_tenant_refused_requests", "Refused by a limit", labels=labels)
        tokens = CounterMetricFamily(
            "shoal_tenant_tokens", "Tokens used, of prompts and outputs", labels=[*labels, "kind"]
        )
        for names, usage in list(self._usage.items()):
            requests.add_metric(names, usage.num_requests)
            refused.add_metric(names, usage.num_refused)
            tokens.add_metric([*names, "prompt"], usage.num_prompt_tokens)
            tokens.add_metric([*names, "output"], usage.num_output_tokens)
        yield from (requests, refused, tokens)


class _ReplicaCollector(Collector):
    """What this ingress knows of replicas: the load that they last reported."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    def collect(self) -> Iterator[Metric]:
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
        rows = [
            EngineRow(model, stream.replica_id, stream.view.load)
            for model, stream in streams
            if stream.view is not None
        ]
        yield from engine_metrics(rows, self._ingress.config.observability.vllm_metric_names)


class _VllmNames(Collector):
    """The ingress's histograms and ends of requests once more, as vLLM calls and labels them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for source in (metrics.first_token_s, metrics.inter_token_s, metrics.request_s):
            for family in source.collect():
                name = VLLM_HISTOGRAMS[family.name]
                renamed = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    labels = {_VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()}
                    sample_name = name + sample.name.removeprefix(family.name)
                    renamed.samples.append(sample._replace(name=sample_name, labels=labels))
                yield renamed
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that came to an end", labels=["model_name", "finished_reason"]
        )
        for family in metrics.ended.collect():
            for sample in family.samples:
                reason = sample.labels["finish_reason"]
                if sample.name.endswith("_total") and reason != ABORTED:
                    success.add_metric([sample.labels["model"], reason], sample.value)
        yield success


_VLLM_LABELS = {"model": "model_name"}
