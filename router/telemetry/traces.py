"""A trace of each generation (OpenTelemetry): the request, below it place, queue, prefill and decode, then steps.

Spans but the request's own are made when all is over, from times that are taken anyway; whether a request is sampled is
known from its beginning, and only those note their steps (``StepLog``). A token of the others pays nothing. The
caller's own trace goes on if its headers name one (W3C Trace Context).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from router.explanation import MAX_CANDIDATES, Placement
from router.generation import ABORTED, Choice, Generation
from router.telemetry.step_log import LoggedStep, StepLog

Attributes = Mapping[str, AttributeValue]

_NS = 1_000_000_000
_COMPUTED = ("prefill", "decode")
"""Phases that consist of steps."""


class Traces:
    """Makes spans with ``tracer``; whoever made it decides what is sampled and where spans go."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        generation: Generation,
        *,
        request_id: str,
        route: str,
        model: str,
        tenant: str,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> Trace:
        """Before a generation starts, on the loop that runs it; ``end`` must follow."""
        wanted = {b"traceparent", b"tracestate"}
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in wanted}
        offset_ns = time.time_ns() - round(asyncio.get_running_loop().time() * _NS)
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
                "shoal.request_id": request_id,
                "shoal.tenant": tenant,
            },
        )
        if span.is_recording():
            for choice in generation.choices:
                choice.course.steps = StepLog(generation.arrival_s)
        return Trace(self._tracer, span, generation, offset_ns)


class Trace:
    """One generation's spans."""

    def __init__(self, tracer: Tracer, span: Span, generation: Generation, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._generation = generation
        self._offset_ns = offset_ns
        """From the event loop's clock to the wall's."""

    def end(self) -> None:
        """Tell of a generation that has just ended, however it did."""
        span, generation = self._span, self._generation
        if span.is_recording():
            reasons = sorted({choice.finish_reason or ABORTED for choice in generation.choices})
            span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": generation.num_output_tokens,
                    "gen_ai.response.finish_reasons": reasons,
                    "shoal.cached_tokens": generation.num_cached_tokens,
                    "shoal.migrations": sum(c.journal.num_migrations for c in generation.choices),
                    "shoal.moves": sum(len(c.journal.moves) for c in generation.choices),
                }
            )
            context = set_span_in_context(span)
            for choice in generation.choices:
                self._add_phases(choice, context)
                self._add_moves(choice)
            if ABORTED in reasons:
                span.set_status(Status(StatusCode.ERROR, "the client left, or the generation failed"))
        span.end()

    def _add_phases(self, choice: Choice, context: Context) -> None:
        log = choice.course.steps
        steps = deque(log.steps if log is not None else ())
        for name, start_s, end_s, attributes in _phases(choice, self._generation.arrival_s):
            phase = self._tracer.start_span(
                name,
                context=context,
                start_time=self._ns(start_s),
                attributes={"shoal.choice": choice.index, **attributes},
            )
            while steps and name in _COMPUTED and (steps[0].end_s <= end_s or name == _COMPUTED[-1]):
                self._add_step(steps.popleft(), set_span_in_context(phase), start_s)
            phase.end(self._ns(end_s))

    def _add_step(self, step: LoggedStep, context: Context, phase_start_s: float) -> None:
        """Of the first one, what lies before the phase was placing and queueing."""
        start_s = min(max(phase_start_s, step.end_s - step.length_s), step.end_s)
        span = self._tracer.start_span(
            "step",
            context=context,
            start_time=self._ns(start_s),
            attributes={
                "shoal.step.index": step.index,
                "shoal.step.tokens": step.num_tokens,
                "shoal.step.running": step.num_running,
                "shoal.step.waiting": step.num_waiting,
            },
        )
        span.end(self._ns(step.end_s))

    def _add_moves(self, choice: Choice) -> None:
        for before, placement in pairwise(choice.journal.placements):
            name, why = "went on at another replica", {"shoal.lost": before.lost or ""}
            if placement.moved is not None:
                name, why = "moved to another queue", {"shoal.moved": placement.moved.reason}
            attributes = {"shoal.choice": choice.index, **why, **_placed(placement)}
            self._span.add_event(name, attributes, self._ns(placement.at_s))

    def _ns(self, loop_s: float) -> int:
        return self._offset_ns + round(loop_s * _NS)


def _phases(choice: Choice, arrival_s: float) -> list[tuple[str, float, float, Attributes]]:
    """Name, beginning, end and facts of what a choice went through, as far as it came."""
    placements, course = choice.journal.placements, choice.course
    if not placements:
        return []
    placed_s = placements[0].at_s
    phases = [("place", arrival_s, placed_s, _placed(placements[0]))]
    if course.first_s is not None:
        queue_s = choice.journal.waited_before_moving_s(course.first_s) + course.waited_s
        computed_s = min(placed_s + queue_s, course.first_s)
        last_s = max(course.first_s, course.last_s or course.first_s)
        num_cached, num_on_host = choice.num_cached_tokens or 0, course.num_host_cached_tokens
        cached: Attributes = {
            "shoal.cached_tokens.device": num_cached - num_on_host,
            "shoal.cached_tokens.host": num_on_host,
        }
        decoded: Attributes = {
            "shoal.preemptions": course.num_preemptions,
            "shoal.steps": course.steps.num_steps if course.steps is not None else 0,
        }
        phases += [
            ("queue", placed_s, computed_s, {}),
            ("prefill", computed_s, course.first_s, cached),
            ("decode", course.first_s, last_s, decoded),
        ]
    return phases


def _placed(placement: Placement) -> Attributes:
    """Where it was sent, and what else was weighed: the best candidates, in order."""
    best = placement.ranked[:MAX_CANDIDATES]
    return {
        "shoal.replica": best[0].candidate.view.replica_id,
        "shoal.candidates": [one.candidate.view.replica_id for one in best],
        "shoal.candidates.cost_s": [one.cost_s for one in best],
        "shoal.candidates.copy_s": [one.forecast.copy_s for one in best],
        "shoal.candidates.cached_tokens": [one.candidate.num_hit_tokens for one in best],
        "shoal.candidates.host_cached_tokens": [one.candidate.num_host_tokens for one in best],
    }
