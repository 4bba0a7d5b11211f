"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from router.ingress import Ingress
from router.served_model import ServedModel
from router.tenancy.keys import Tenant


def model_list(ingress: Ingress, tenant: Tenant, created: int) -> dict[str, Any]:
    """All models that ``tenant`` may use, under each of their names."""
    data = [
        model_object(model, name, created)
        for model in ingress.models
        if any(map(tenant.may_use, model.config.served_names))
        for name in model.config.served_names
    ]
    return {"object": "list", "data": data}


def model_object(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """One model; ``max_model_len`` is an addition that vLLM's users know."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "shoal",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }
