"""Why a request went where it went, and what became of it there: the answer to ``X-Shoal-Explain: 1``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.placement.candidate import Forecast, Ranked
from router.telemetry.step_log import StepLog

if TYPE_CHECKING:
    from router.generation import Choice, Generation

MAX_CANDIDATES = 16
"""Of each placement, where explanations are kept or sent on: hundreds of replicas would make them long."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Why a request left the queue that it was in."""

    reason: str
    """``room``: another replica had room sooner than was forecast; ``joined``: one has come, or come back, since;
    ``draining``: its own lets no more in."""
    stay: Forecast
    """When it would have started where it was."""


@dataclass(slots=True)
class Placement:
    """One time that a request was sent to a replica."""

    at_s: float
    """On the event loop's clock."""
    ranked: Sequence[Ranked]
    """All candidates, best first: the first was taken."""
    membership_version: int
    """Of the set of replicas that the candidates were of."""
    lost: str | None = None
    """How the replica was lost to it; None if it was not."""
    moved: Moved | None = None
    """Of one that waited at another replica before, and had not begun; None: it is its first, or it was lost."""


@dataclass(slots=True)
class Course:
    """What a choice's outputs tell of its time at replicas; times on the event loop's clock."""

    first_s: float | None = None
    last_s: float | None = None
    waited_s: float = 0.0
    """At the replica that began it, before its first step."""
    num_host_cached_tokens: int = 0
    num_preemptions: int = 0
    """At the last replica."""
    steps: StepLog | None = None
    """Of a request that is traced; None: nobody wants to know."""


def explanation(
    generation: Generation,
    request_id: str,
    max_candidates: int | None = None,
    max_choices: int | None = None,
) -> dict[str, Any]:
    """All that is known of a generation, which may still run.

    Args:
        generation: what is explained.
        request_id: of the HTTP request.
        max_candidates: told of each placement, the best; None: all.
        max_choices: told, the first; None: all.
    """
    return {
        "request_id": request_id,
        "outcome": generation.outcome,
        "num_choices": len(generation.choices),
        "choices": [
            _choice(choice, generation.arrival_s, max_candidates)
            for choice in generation.choices[:max_choices]
        ],
    }


def _choice(choice: Choice, arrival_s: float, max_candidates: int | None) -> dict[str, Any]:
    course, placements = choice.course, choice.journal.placements
    num_cached = choice.num_cached_tokens or 0
    first_s = course.first_s if course.first_s is not None else arrival_s
    placed_s = placements[0].at_s if placements else arrival_s
    queue_s = choice.journal.waited_before_moving_s(course.first_s) + course.waited_s
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "replica": choice.journal.replica_id,
        "placements": [_placement(one, arrival_s, max_candidates) for one in placements],
        "cached_tokens": {
            "device": num_cached - course.num_host_cached_tokens,
            "host": course.num_host_cached_tokens,
        },
        "placed_after_s": _seconds(placed_s - arrival_s),
        "queue_s": _seconds(queue_s),
        "prefill_s": _seconds(first_s - placed_s - queue_s),
        "decode_s": _seconds((course.last_s or first_s) - first_s),
        "num_preemptions": course.num_preemptions,
        "num_moves": len(choice.journal.moves),
        "num_migrations": choice.journal.num_migrations,
    }


def _placement(placement: Placement, arrival_s: float, max_candidates: int | None) -> dict[str, Any]:
    return {
        "replica": placement.ranked[0].candidate.view.replica_id,
        "after_s": _seconds(placement.at_s - arrival_s),
        "candidates": [
            {
                "replica": one.candidate.view.replica_id,
                "cost_s": _seconds(one.cost_s),
                "wait_s": _seconds(one.forecast.wait_s),
                "copy_s": _seconds(one.forecast.copy_s),
                "work_s": _seconds(one.forecast.work_s),
                "predicted_cached_tokens": {
                    "device": one.candidate.num_hit_tokens - one.candidate.num_host_tokens,
                    "host": one.candidate.num_host_tokens,
                },
            }
            for one in placement.ranked[:max_candidates]
        ],
        "num_candidates": len(placement.ranked),
        "membership_version": placement.membership_version,
        "lost": placement.lost,
        "moved": _moved(placement),
    }


def _moved(placement: Placement) -> dict[str, Any] | None:
    """Why it changed queues, and by how much sooner it was to start; its last replica is the second candidate."""
    moved = placement.moved
    if moved is None:
        return None
    start_s = placement.ranked[0].forecast.start_s
    return {"reason": moved.reason, "gain_s": _seconds(moved.stay.start_s - start_s)}


def _seconds(value: float) -> float:
    """To the microsecond; a clock read between two threads may seem to run backwards by less."""
    return round(max(0.0, value), 6)
