"""All metric names of an engine, read from its ``Load``; with a switch also under the names that vLLM gives them.

A replica exports its own; an ingress shows what it knows of all replicas, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.brain_messages import Load

Read = Callable[[Load], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "shoal_replica_running_requests": ("Requests in the batch", lambda load: load.num_running),
    "shoal_replica_waiting_requests": ("Requests queued at the replica", lambda load: load.num_waiting),
    "shoal_replica_queued_tokens": ("Uncached tokens not yet computed", lambda load: load.num_queued_tokens),
    "shoal_replica_queued_work_seconds": (
        "Seconds of prefill that wait, by the cost model",
        lambda load: load.queued_work_s,
    ),
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
    "shoal_replica_host_blocks": ("KV blocks in host memory", lambda load: load.num_host_blocks),
    "shoal_replica_free_host_blocks": (
        "Of those, without a holder",
        lambda load: load.num_free_host_blocks,
    ),
    "shoal_replica_step_base_seconds": ("Cost model: a step's fixed part", lambda load: load.cost.base_s),
    "shoal_replica_prefill_token_seconds": (
        "Cost model: one prefill token",
        lambda load: load.cost.per_token_s,
    ),
    "shoal_replica_sequence_seconds": (
        "Cost model: one decoding request",
        lambda load: load.cost.per_sequence_s,
    ),
    "shoal_replica_context_token_seconds": (
        "Cost model: one KV token that decoding reads",
        lambda load: load.cost.per_context_token_s,
    ),
    "shoal_replica_attended_pair_seconds": (
        "Cost model: one prefill token that reads one KV token",
        lambda load: load.cost.per_attended_s,
    ),
    "shoal_replica_copy_block_seconds": (
        "Cost model: one block between device and host",
        lambda load: load.cost.copy_block_s,
    ),
    "shoal_replica_step_error_ratio": (
        "Cost model: median error of its predictions for the last hundred steps, relative to what they took",
        lambda load: load.step_error_p50,
    ),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "shoal_replica_steps": ("Engine steps", lambda load: load.num_steps),
    "shoal_replica_preemptions": ("Preemptions", lambda load: load.num_preemptions),
    "shoal_replica_swap_preemptions": (
        "Preemptions that kept their blocks in host memory",
        lambda load: load.num_swap_preemptions,
    ),
    "shoal_replica_blocks_swapped_out": (
        "Blocks copied to the host",
        lambda load: load.num_blocks_swapped_out,
    ),
    "shoal_replica_blocks_swapped_in": (
        "Blocks copied from the host",
        lambda load: load.num_blocks_swapped_in,
    ),
    "shoal_replica_corrupt_blocks": (
        "Copies from the host that did not find what was copied there",
        lambda load: load.num_corrupt_blocks,
    ),
    "shoal_replica_forked_blocks": (
        "Blocks that choices and beams shared by forking instead of each computing its own",
        lambda load: load.num_forked_blocks,
    ),
    "shoal_replica_tail_copies": (
        "Shared blocks copied before one of those that shared them wrote to it",
        lambda load: load.num_tail_copies,
    ),
    "shoal_replica_host_cached_prompt_tokens": (
        "Prompt tokens brought back from the host",
        lambda load: load.num_host_cached_tokens,
    ),
    "shoal_replica_prompt_tokens": ("Prompt tokens admitted", lambda load: load.num_prompt_tokens),
    "shoal_replica_cached_prompt_tokens": (
        "Prompt tokens found in the prefix cache",
        lambda load: load.num_cached_tokens,
    ),
    "shoal_replica_output_tokens": ("Tokens sampled", lambda load: load.num_output_tokens),
}

# Names and meanings: vllm/v1/metrics/loggers.py of vLLM 0.26.0; shares lie between 0 and 1 there too.
VLLM_GAUGES: dict[str, tuple[str, Read]] = {
    "vllm:num_requests_running": ("Requests in the batch", lambda load: load.num_running),
    "vllm:num_requests_waiting": ("Requests that wait", lambda load: load.num_waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of KV blocks in use",
        lambda load: 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
    ),
}
VLLM_COUNTERS: dict[str, tuple[str, Read]] = {
    "vllm:num_preemptions": ("Preemptions", lambda load: load.num_preemptions),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        lambda load: load.num_prompt_tokens,
    ),
    "vllm:prefix_cache_hits": ("Of those, found", lambda load: load.num_cached_tokens),
    "vllm:prompt_tokens": ("Prompt tokens", lambda load: load.num_prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated", lambda load: load.num_output_tokens),
}


class EngineRow(NamedTuple):
    """One engine's load and whose it is."""

    model: str
    replica: str
    load: Load


def engine_metrics(rows: Iterable[EngineRow], vllm_names: bool) -> Iterator[Metric]:
    """The metrics of these engines."""
    rows = list(rows)
    yield from _families(GAUGES, COUNTERS, ["model", "replica"], rows)
    if vllm_names:
        yield from _families(VLLM_GAUGES, VLLM_COUNTERS, ["model_name", "engine"], rows)


class EngineCollector(Collector):
    """What a replica registers: its own engine, read when scraped."""

    def __init__(self, read: Callable[[], EngineRow], vllm_names: bool) -> None:
        self._read = read
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        yield from engine_metrics([self._read()], self._vllm_names)


def _families(
    gauges: dict[str, tuple[str, Read]],
    counters: dict[str, tuple[str, Read]],
    labels: list[str],
    rows: list[EngineRow],
) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, read) in table.items():
            family = kind(name, text, labels=labels)
            for row in rows:
                family.add_metric([row.model, row.replica], read(row.load))
            yield family
