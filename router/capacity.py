"""How much work this ingress may still send on: ``x-ratelimit-*`` of answers, and ``GET /load``."""

from __future__ import annotations

import math
from typing import Any

from router.edge import Headers
from router.ingress import Ingress
from router.tenancy.gate import Budget
from router.tenancy.keys import Tenant


def rate_limit_headers(ingress: Ingress, tenant: Tenant | None) -> Headers:
    """What the caller may still ask for: of its own key's limits where it has some, else of the replicas' queues.

    None: whoever has shown no valid key is told nothing. Nor is anybody where nobody is let in any more: no limit of
    theirs is why.
    """
    if tenant is None or ingress.gate.is_closed:
        return []
    budgets = {"requests": queue_budget(ingress), **ingress.gate.budgets(tenant)}
    return [header for what, budget in budgets.items() for header in _headers(what, budget)]


def queue_budget(ingress: Ingress) -> Budget:
    """Requests that the replicas' queues take before a 429, those that still fit, and when what waits has begun.

    The counts are of all models together, as this ingress sees them now; nobody has reserved them.
    """
    views = [view for model in ingress.models for view in model.replicas.open_views]
    limit = ingress.limits.max_waiting_per_replica * len(views)
    num_waiting = sum(min(view.num_waiting, ingress.limits.max_waiting_per_replica) for view in views)
    num_waiting = min(limit, num_waiting + sum(model.replicas.num_held for model in ingress.models))
    reset_s = max((view.queued_work_s for view in views), default=0.0)
    return Budget(limit, limit - num_waiting, reset_s)


def _headers(what: str, budget: Budget) -> Headers:
    name = what.encode()
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % budget.limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % budget.remaining),
        (b"x-ratelimit-reset-" + name, b"%dms" % math.ceil(budget.reset_s * 1000)),
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
