"""Where traces go: an exporter of OpenTelemetry's, which is an extra (``pip install 'shoal[tracing]'``)."""

from __future__ import annotations

from router.config import Observability
from router.telemetry.traces import Traces
from workers.engine.errors import InvalidRequest


def make_traces(config: Observability) -> Traces | None:
    """What an ingress tells of requests; None if there is no endpoint for it.

    Raises:
        InvalidRequest: the packages are missing.
    """
    if config.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        raise InvalidRequest(
            f"--otlp-endpoint is {config.otlp_endpoint}, and the exporter is not installed: "
            "pip install 'shoal[tracing]'",
            "otlp_endpoint",
        ) from None
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)),
        resource=Resource.create({"service.name": "shoal"}),
    )
    endpoint = config.otlp_endpoint.rstrip("/")
    path = "" if endpoint.endswith("/v1/traces") else "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint + path)))
    return Traces(provider.get_tracer("shoal"))
