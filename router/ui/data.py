"""What the page at ``/ui`` reads once a second: totals and states, from which it makes rates and quantiles.

Totals are since start, by process: the balancer may ask another ingress each time, and the page keeps them apart.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from typing import Any

from prometheus_client.registry import Collector

from router.ingress import Ingress
from router.openai.metrics import Metrics
from router.replica_stream import ReplicaStream
from router.served_model import ServedModel


@cache
def page() -> bytes:
    """The page itself: one file, which loads nothing from elsewhere."""
    return files("router.ui").joinpath("page.html").read_bytes()


PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


def snapshot(ingress: Ingress, metrics: Metrics) -> dict[str, Any]:
    """The state of all models as this ingress knows it."""
    return {
        "process": os.getpid(),
        "models": [_model(model, metrics) for model in ingress.models],
    }


def _model(model: ServedModel, metrics: Metrics) -> dict[str, Any]:
    return {
        "name": model.name,
        "num_in_flight": model.replicas.num_placed,
        "first_token_s": _histogram(metrics.first_token_s, model.name),
        "inter_token_s": _histogram(metrics.inter_token_s, model.name),
        "replicas": [_replica(stream) for stream in model.replicas.streams],
    }


def _replica(stream: ReplicaStream) -> dict[str, Any]:
    state: dict[str, Any] = {
        "id": stream.replica_id,
        "is_open": stream.is_open,
        "num_losses": stream.num_losses,
    }
    if stream.view is None:
        return state
    load = stream.view.load
    return state | {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "queued_work_s": load.queued_work_s,
        "num_blocks": load.num_blocks,
        "num_used_blocks": load.num_blocks - load.num_free_blocks,
        "num_host_blocks": load.num_host_blocks,
        "num_used_host_blocks": load.num_host_blocks - load.num_free_host_blocks,
        "num_prompt_tokens": load.num_prompt_tokens,
        "num_cached_tokens": load.num_cached_tokens,
        "num_output_tokens": load.num_output_tokens,
        "num_preemptions": load.num_preemptions,
    }


def _histogram(collector: Collector, model: str) -> list[list[float]]:
    """Upper bounds (-1: none) and how many were at or below each."""
    return [
        [-1.0 if sample.labels["le"] == "+Inf" else float(sample.labels["le"]), sample.value]
        for family in collector.collect()
        for sample in family.samples
        if sample.name.endswith("_bucket") and sample.labels["model"] == model
    ]
