"""What is told of each request when it has ended: a line of log without its text, and a trace."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from cluster.logs import JsonFormatter, TextFormatter
from router.config import Observability
from router.scripted_replica import ScriptedReplica
from router.telemetry.step_log import NUM_FIRST, NUM_LONGEST, StepLog
from router.telemetry.traces import Traces

SECRET = "the treasure is under the oak"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "router.requests"]


async def test_each_generation_is_one_line_with_its_id_and_without_its_text(
    make_edge, caplog: pytest.LogCaptureFixture
) -> None:
    edge = await make_edge(ScriptedReplica())
    with caplog.at_level(logging.INFO, "router.requests"):
        await edge.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": SECRET, "max_tokens": 3},
            headers={"x-request-id": "mine-1"},
        )

    (record,) = records(caplog)
    line = JsonFormatter("ingress-1").format(record)
    told = json.loads(line)
    assert told["request_id"] == "mine-1"
    assert (told["model"], told["tenant"], told["replicas"]) == ("tiny", "anonymous", ["replica-0"])
    assert (told["num_prompt_tokens"], told["num_output_tokens"]) == (len(SECRET), 3)
    assert told["finish_reasons"] == ["length"]
    assert told["duration_s"] >= told["first_token_s"] > 0
    assert SECRET not in line
    assert "treasure" not in caplog.text
    assert "request_id=mine-1" in TextFormatter("ingress-1").format(record)


async def test_a_client_that_leaves_is_told_as_aborted(make_edge, caplog: pytest.LogCaptureFixture) -> None:
    edge = await make_edge(ScriptedReplica(step_s=0.01, script=lambda submit: [97] * 4000))
    url = await edge.listen()
    with caplog.at_level(logging.INFO, "router.requests"):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            await anext(answer.aiter_lines())
        await edge.until(lambda: bool(records(caplog)))

    assert records(caplog)[0].fields["finish_reasons"] == ["abort"]  # type: ignore[attr-defined]


def traced(edge, sampler: Sampler = ALWAYS_ON) -> InMemorySpanExporter:
    """Where the spans of an edge's requests come out from now on."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    edge.ingress.traces = Traces(provider.get_tracer("test"))
    return spans


async def test_a_trace_goes_on_with_the_callers_and_shows_every_phase(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), observability=Observability())
    spans = traced(edge)

    await edge.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": SECRET, "max_tokens": 3},
        headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"},
    )

    *below, request = spans.get_finished_spans()
    phases = [one for one in below if one.name != "step"]
    assert request.name == "POST /v1/completions"
    assert format(request.context.trace_id, "032x") == TRACE_ID
    assert format(request.parent.span_id, "016x") == "b7ad6b7169203331"
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert [one.name for one in phases] == ["place", "queue", "prefill", "decode"]
    assert all(one.parent.span_id == request.context.span_id for one in phases)
    ends = [request.start_time] + [one.end_time for one in phases]
    assert [one.start_time for one in phases] == ends[:-1]  # each begins where the last one ended
    assert request.end_time >= phases[-1].end_time
    place, _, prefill, decode = (dict(one.attributes) for one in phases)
    assert place["shoal.replica"] == "replica-0"
    assert place["shoal.candidates"] == ("replica-0",)
    assert len(place["shoal.candidates.cost_s"]) == len(place["shoal.candidates.cached_tokens"]) == 1
    assert prefill["shoal.cached_tokens.device"] == prefill["shoal.cached_tokens.host"] == 0
    assert decode["shoal.preemptions"] == request.attributes["shoal.migrations"] == 0
    assert SECRET not in str([one.to_json() for one in spans.get_finished_spans()])


async def test_steps_lie_below_the_phase_that_they_belong_to(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=0.002))
    spans = traced(edge)

    await edge.client.post("/v1/completions", json={"model": "tiny", "prompt": SECRET, "max_tokens": 5})

    by_name = {one.name: one for one in spans.get_finished_spans()}
    steps = [one for one in spans.get_finished_spans() if one.name == "step"]
    assert [one.attributes["shoal.step.index"] for one in steps] == list(range(5))
    assert sum(one.attributes["shoal.step.tokens"] for one in steps) == 5
    parents = [one.parent.span_id for one in steps]
    assert parents[0] == by_name["prefill"].context.span_id
    assert parents[-1] == by_name["decode"].context.span_id
    assert all(one.end_time >= one.start_time for one in steps)
    assert by_name["decode"].attributes["shoal.steps"] == 5


async def test_a_request_that_is_not_sampled_notes_no_steps(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    spans = traced(edge, ALWAYS_OFF)
    logs: list[StepLog] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.telemetry.traces.StepLog", lambda start_s: logs.append(StepLog(start_s)))
        await edge.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 3})

    assert spans.get_finished_spans() == ()
    assert logs == []


def test_of_a_long_request_the_first_steps_and_the_longest_are_kept() -> None:
    log = StepLog(0.0)
    now_s = 0.0
    for index in range(1000):
        now_s += 1.0 if index == 500 else 0.01
        log.note(now_s, 1, 3, 0)

    kept = [step.index for step in log.steps]
    assert log.num_steps == 1000
    assert len(kept) == NUM_FIRST + NUM_LONGEST
    assert kept == sorted(kept)
    assert kept[:NUM_FIRST] == list(range(NUM_FIRST))
    assert 500 in kept
