"""How much work this ingress may still send on: ``x-ratelimit-*`` of every answer, and ``GET /load``."""

from __future__ import annotations

import math
from typing import Any

from router.edge import Headers
from router.ingress import Ingress


def rate_limit_headers(ingress: Ingress) -> Headers:
    """Requests that the replicas' queues take before a 429, those that still fit, and when what waits has begun.

    The counts are of all models together, as this ingress sees them now; nobody has reserved them.
    """
    views = [view for model in ingress.models for view in model.replicas.open_views]
    limit = ingress.limits.max_waiting_per_replica * len(views)
    num_waiting = sum(min(view.num_waiting, ingress.limits.max_waiting_per_replica) for view in views)
    num_waiting = min(limit, num_waiting + sum(model.replicas.num_held for model in ingress.models))
    reset_s = max((view.queued_work_s for view in views), default=0.0)
    return [
        (b"x-ratelimit-limit-requests", b"%d" % limit),
        (b"x-ratelimit-remaining-requests", b"%d" % (limit - num_waiting)),
        (b"x-ratelimit-reset-requests", b"%dms" % math.ceil(reset_s * 1000)),
    ]


def load_report(ingress: Ingress) -> dict[str, Any]:
    """Requests under way in all (vLLM's ``server_load``), and of each model's replicas what runs and waits."""
    models = {
        model.name: {
            "num_requests": model.replicas.num_placed,
            "num_running": sum(view.load.num_running for view in model.replicas.open_views),
            "num_waiting": sum(view.load.num_waiting for view in model.replicas.open_views),
            "queued_work_s": max(
                (view.queued_work_s for view in model.replicas.open_views),
                default=0.0,
            ),
        }
        for model in ingress.models
    }
    return {"server_load": sum(model.replicas.num_placed for model in ingress.models), "models": models}
