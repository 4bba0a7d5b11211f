"""One line of log for each generation, with its request id; never what was asked or answered."""

from __future__ import annotations

import logging
from typing import Any

from router.generation import ABORTED, Generation
from router.openai.metrics import GenerationTimer

log = logging.getLogger("router.requests")


def log_request(request_id: str, tenant: str, generation: Generation, timer: GenerationTimer) -> None:
    """Say at INFO how a generation went."""
    if not log.isEnabledFor(logging.INFO):
        return
    choices = generation.choices
    fields: dict[str, Any] = {
        "request_id": request_id,
        "generation_id": generation.request_id,
        "tenant": tenant,
        "model": timer.model,
        "replicas": sorted({choice.journal.replica_id for choice in choices if choice.journal.replica_id}),
        "finish_reasons": sorted({choice.finish_reason or ABORTED for choice in choices}),
        "num_prompt_tokens": generation.num_prompt_tokens,
        "num_cached_tokens": generation.num_cached_tokens,
        "num_output_tokens": generation.num_output_tokens,
        "num_moves": sum(len(choice.journal.moves) for choice in choices),
        "num_migrations": sum(choice.journal.num_migrations for choice in choices),
        "first_token_s": None if timer.first_token_s is None else round(timer.first_token_s, 6),
        "duration_s": round(timer.duration_s, 6),
    }
    log.info("generation ended", extra={"fields": fields})
