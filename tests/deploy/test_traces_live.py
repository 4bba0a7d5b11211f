"""Traces of a running cluster as a collector gets them: one request from the caller's span to the engine's steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a word that no collector may see"


class Collector(HTTPServer):
    """Takes what OTLP over HTTP sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []

    def spans(self) -> list[Span]:
        """All that have come."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # the library's name
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_collector_gets_each_phase_of_a_request_and_none_of_its_text(
    start_cluster: Callable[..., ServedCluster],
    demo_model: ModelFiles,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    cluster = start_cluster(
        *("--scripted", "--replicas", "1", "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}")
    )
    cluster.wait_until_up()

    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"model": cluster.model, "prompt": SECRET, "max_tokens": 8},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        timeout=60,
    ).json()
    deadline = time.monotonic() + 30
    while not any(one.name == "POST /v1/completions" for one in collector.spans()):
        assert time.monotonic() < deadline, "no trace came"
        time.sleep(0.1)
    cluster.stop()

    spans = {span.name: span for span in collector.spans() if span.trace_id.hex() == TRACE}
    request = spans["POST /v1/completions"]
    assert request.parent_span_id.hex() == PARENT
    for phase in ("place", "queue", "prefill", "decode"):
        assert spans[phase].parent_span_id == request.span_id
        assert request.start_time_unix_nano <= spans[phase].start_time_unix_nano
        assert spans[phase].end_time_unix_nano <= request.end_time_unix_nano
    assert spans["step"].parent_span_id in {spans["prefill"].span_id, spans["decode"].span_id}
    told = b"".join(collector.bodies)
    assert SECRET.encode() not in told
    assert answer["choices"][0]["text"].encode() not in told
