"""A trace of each generation (OpenTelemetry): one span for the request, below it place, queue, prefill and decode.

Spans are made when all is over, from times that are taken anyway: a token pays nothing for them. The caller's own
trace goes on if its headers name one (W3C Trace Context).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.generation import ABORTED, Choice, Generation

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
            },
        )
        if span.is_recording():
            context = set_span_in_context(span)
            for choice in generation.choices:
                for name, start_s, end_s in _phases(choice, generation.arrival_s):
                    phase = self._tracer.start_span(
                        name,
                        context=context,
                        start_time=offset_ns + round(start_s * _NS),
                        attributes={
                            "shoal.choice": choice.index,
                            "shoal.replica": choice.journal.replica_id,
                            "shoal.preemptions": choice.course.num_preemptions,
                        },
                    )
                    phase.end(offset_ns + round(end_s * _NS))
                for placement in choice.journal.placements[1:]:
                    span.add_event(
                        "went on at another replica",
                        {"shoal.choice": choice.index, "shoal.replica": choice.journal.replica_id},
                        offset_ns + round(placement.at_s * _NS),
                    )
            if ABORTED in reasons:
                span.set_status(Status(StatusCode.ERROR, "the client left, or the generation failed"))
        span.end()


def _phases(choice: Choice, arrival_s: float) -> list[tuple[str, float, float]]:
    """Name, beginning and end of what a choice went through, as far as it came."""
    placements, course = choice.journal.placements, choice.course
    if not placements:
        return []
    placed_s = placements[0].at_s
    phases = [("place", arrival_s, placed_s)]
    if course.first_s is not None:
        computed_s = min(placed_s + course.waited_s, course.first_s)
        phases += [("queue", placed_s, computed_s), ("prefill", computed_s, course.first_s)]
        phases.append(("decode", course.first_s, max(course.first_s, course.last_s or course.first_s)))
    return phases
