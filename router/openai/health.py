"""``GET /health``: can this ingress serve anything? With ``?deep=1`` each model proves it by a token.

``GET /health/live`` needs no more than an answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from router.generation import TextParams
from router.ingress import Ingress
from router.journal import Prompt
from router.served_model import ServedModel
from workers.engine.errors import ShoalError
from workers.engine.request import ChoiceParams

DEEP_TIMEOUT_S = 10.0
"""For a token of each model: probes of load balancers and Kubernetes rarely wait longer."""
HEALTH_RETRY_S = "10"
"""``Retry-After`` of a 503: about what a new process takes."""

_STATUS = "status"


def health(ingress: Ingress) -> tuple[int, dict[str, Any]]:
    """Status and body: 200 while any model can be served, with the state of each."""
    return _summary(ingress, {model.name: _model_state(model) for model in ingress.models})


async def deep_health(ingress: Ingress, probe_id: str) -> tuple[int, dict[str, Any]]:
    """As ``health``, where a model is ready only if it has just generated a token."""
    states = {model.name: _model_state(model) for model in ingress.models}
    ready = [model for model in ingress.models if states[model.name][_STATUS] == "ready"]
    outcomes = await asyncio.gather(*(_one_token(ingress, model, probe_id) for model in ready))
    for model, outcome in zip(ready, outcomes, strict=True):
        states[model.name] |= outcome
    return _summary(ingress, states)


def _summary(ingress: Ingress, states: dict[str, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    if ingress.gate.is_closed:
        return 503, {_STATUS: "shutting down", "models": states}
    is_ready = any(state[_STATUS] in ("ready", "asleep") for state in states.values())
    return (200 if is_ready else 503), {_STATUS: "ready" if is_ready else "unavailable", "models": states}


def _model_state(model: ServedModel) -> dict[str, Any]:
    streams = model.replicas.streams
    num_open = sum(stream.is_open for stream in streams)
    return {
        _STATUS: "ready" if num_open else "asleep" if model.config.scales_to_zero else "unavailable",
        "min_replicas": model.config.min_replicas,
        "num_replicas": len(streams),
        "num_open_replicas": num_open,
        "membership_version": model.replicas.membership_version,
        "num_requests": model.replicas.num_placed + model.replicas.num_held,
    }


async def _one_token(ingress: Ingress, model: ServedModel, probe_id: str) -> dict[str, Any]:
    params = ChoiceParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    generation = ingress.generation(model, f"health-{probe_id}", [Prompt([0])], [params], TextParams())
    started_s = time.perf_counter()
    try:
        async with asyncio.timeout(DEEP_TIMEOUT_S):
            await generation.start()
            while not generation.is_finished:
                await generation.next()
    except TimeoutError:
        return {_STATUS: "stuck", "error": f"no token within {DEEP_TIMEOUT_S:g} s"}
    except ShoalError as error:
        return {_STATUS: "unavailable", "error": str(error)}
    finally:
        generation.close()
    return {"token_s": round(time.perf_counter() - started_s, 6)}
