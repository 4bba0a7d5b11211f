"""A trace of each generation (OpenTelemetry): one span for the request, below it place, queue, prefill and decode.

Spans are made when all is over, from times that are taken anyway: a token pays nothing for them. The caller's own
trace goes on if its headers name one (W3C Trace Context).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from router.explanation import MAX_CANDIDATES, Placement
from router.generation import ABORTED, Choice, Generation

Attributes = Mapping[str, AttributeValue]

_NS = 1_000_000_000


class Traces:
    """Makes spans with ``tracer``; whoever made it decides what is sampled and where spans go."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def export(
        self,
        generation: Generation,
        *,
        request_id: str,
        route: str,
        model: str,
        tenant: str,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        """Tell of a generation that has just ended; on the loop that ran it."""
        wanted = {b"traceparent", b"tracestate"}
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in wanted}
        offset_ns = time.time_ns() - round(asyncio.get_running_loop().time() * _NS)
        reasons = sorted({choice.finish_reason or ABORTED for choice in generation.choices})
        # Names of attributes: OpenTelemetry's semantic conventions for generative AI.
        span = self._tracer.start_span(
            route,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=offset_ns + round(generation.arrival_s * _NS),
            attributes={
                "gen_ai.system": "shoal",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
                "gen_ai.usage.output_tokens": generation.num_output_tokens,
                "gen_ai.response.finish_reasons": reasons,
                "shoal.request_id": request_id,
                "shoal.tenant": tenant,
                "shoal.cached_tokens": generation.num_cached_tokens,
                "shoal.migrations": sum(
                    max(0, len(choice.journal.placements) - 1) for choice in generation.choices
                ),
            },
        )
        if span.is_recording():
            context = set_span_in_context(span)
            for choice in generation.choices:
                for name, start_s, end_s, attributes in _phases(choice, generation.arrival_s):
                    phase = self._tracer.start_span(
                        name,
                        context=context,
                        start_time=offset_ns + round(start_s * _NS),
                        attributes={"shoal.choice": choice.index, **attributes},
                    )
                    phase.end(offset_ns + round(end_s * _NS))
                for before, placement in pairwise(choice.journal.placements):
                    span.add_event(
                        "went on at another replica",
                        {
                            "shoal.choice": choice.index,
                            "shoal.lost": before.lost or "",
                            **_placed(placement),
                        },
                        offset_ns + round(placement.at_s * _NS),
                    )
            if ABORTED in reasons:
                span.set_status(Status(StatusCode.ERROR, "the client left, or the generation failed"))
        span.end()


def _phases(choice: Choice, arrival_s: float) -> list[tuple[str, float, float, Attributes]]:
    """Name, beginning, end and facts of what a choice went through, as far as it came."""
    placements, course = choice.journal.placements, choice.course
    if not placements:
        return []
    placed_s = placements[0].at_s
    phases = [("place", arrival_s, placed_s, _placed(placements[0]))]
    if course.first_s is not None:
        computed_s = min(placed_s + course.waited_s, course.first_s)
        last_s = max(course.first_s, course.last_s or course.first_s)
        num_cached, num_on_host = choice.num_cached_tokens or 0, course.num_host_cached_tokens
        cached: Attributes = {
            "shoal.cached_tokens.device": num_cached - num_on_host,
            "shoal.cached_tokens.host": num_on_host,
        }
        preempted: Attributes = {"shoal.preemptions": course.num_preemptions}
        phases += [
            ("queue", placed_s, computed_s, {}),
            ("prefill", computed_s, course.first_s, cached),
            ("decode", course.first_s, last_s, preempted),
        ]
    return phases


def _placed(placement: Placement) -> Attributes:
    """Where it was sent, and what else was weighed: the best candidates, in order."""
    best = placement.ranked[:MAX_CANDIDATES]
    return {
        "shoal.replica": best[0].candidate.view.replica_id,
        "shoal.candidates": [one.candidate.view.replica_id for one in best],
        "shoal.candidates.cost_s": [one.cost_s for one in best],
        "shoal.candidates.cached_tokens": [one.candidate.num_hit_tokens for one in best],
    }
