"""What is told of each request when it has ended: a line of log without its text, and a trace."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.logs import JsonFormatter, TextFormatter
from router.config import Observability
from router.scripted_replica import ScriptedReplica
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


async def test_a_trace_goes_on_with_the_callers_and_shows_every_phase(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), observability=Observability())
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    edge.ingress.traces = Traces(provider.get_tracer("test"))

    await edge.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": SECRET, "max_tokens": 3},
        headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"},
    )

    *phases, request = spans.get_finished_spans()
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
