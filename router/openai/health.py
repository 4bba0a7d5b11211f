"""``GET /health``: can this ingress serve anything? ``GET /health/live`` needs no more than an answer."""

from __future__ import annotations

from typing import Any

from router.ingress import Ingress, ServedModel


def health(ingress: Ingress) -> tuple[int, dict[str, Any]]:
    """Status and body: 200 while any model can be served, with the state of each."""
    states = {model.name: _model_state(model) for model in ingress.models}
    is_ready = any(state["status"] == "ready" for state in states.values())
    return (200 if is_ready else 503), {"status": "ready" if is_ready else "unavailable", "models": states}


def _model_state(model: ServedModel) -> dict[str, Any]:
    streams = model.replicas.streams
    num_open = sum(stream.is_open for stream in streams)
    return {
        "status": "ready" if num_open else "unavailable",
        "num_replicas": len(streams),
        "num_open_replicas": num_open,
        "num_requests": model.replicas.num_placed,
    }
