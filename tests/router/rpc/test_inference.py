"""The gRPC API as a generated client sees it, with the errors of the HTTP API."""

from __future__ import annotations

import asyncio
import importlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.config import Limits, RpcConfig, Timeouts
from router.rpc.server import start_rpc_server
from router.scripted_replica import ScriptedReplica
from router.telemetry.traces import Traces
from router.tenancy.keys import ring_of_keys

PROTO = Path(__file__).resolve().parents[3] / "router" / "rpc" / "proto" / "inference.proto"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Code generated from the .proto file, as a user generates it; only its package differs from ours here."""
    folder = tmp_path_factory.mktemp("client")
    text = PROTO.read_text().replace("package shoal.inference.v1;", "package user.inference.v1;")
    (folder / "user_inference.proto").write_text(text)
    done = protoc.main(
        ["", f"-I{folder}", f"--python_out={folder}", f"--grpc_python_out={folder}", "user_inference.proto"]
    )
    assert done == 0
    sys.path.insert(0, str(folder))
    try:
        messages = importlib.import_module("user_inference_pb2")
        stubs = importlib.import_module("user_inference_pb2_grpc")
    finally:
        sys.path.remove(str(folder))
    return messages, stubs


def generate(channel: grpc.aio.Channel, messages: Any, metadata: Any = None, **fields: Any) -> Any:
    """Call as the generated stub does; the path names our package."""
    call = channel.unary_stream(
        "/shoal.inference.v1.Inference/Generate",
        request_serializer=messages.GenerateRequest.SerializeToString,
        response_deserializer=messages.GenerateResponse.FromString,
    )
    return call(messages.GenerateRequest(**{"model": "tiny", **fields}), metadata=metadata)


def says(text: str):
    return lambda submit: list(text.encode())


async def test_a_generated_client_streams_text(generated: Any, connect: Any) -> None:
    messages, stubs = generated
    edge, channel = await connect(ScriptedReplica(script=says("Hello, wörld")))

    answers = [one async for one in generate(channel, messages, prompt="hi", max_tokens=99, temperature=0)]

    assert hasattr(stubs, "InferenceStub")
    assert "".join(one.text for one in answers) == "Hello, wörld"
    assert [one.finish_reason for one in answers if one.finish_reason] == ["stop"]
    assert (answers[-1].usage.prompt_tokens, answers[-1].usage.completion_tokens) == (2, 14)
    (submit,) = edge.replica.submits
    assert (list(submit.prompt_token_ids), submit.params.temperature) == (list(b"hi"), 0)


async def test_a_call_is_told_of_in_log_and_trace_as_over_http(
    generated: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    messages, _ = generated
    edge, channel = await connect(ScriptedReplica())
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    edge.ingress.traces = Traces(provider.get_tracer("test"))
    parent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

    with caplog.at_level(logging.INFO, "router.requests"):
        async for _ in generate(channel, messages, metadata=(parent,), prompt="hi", max_tokens=3):
            pass

    *below, request = spans.get_finished_spans()
    assert request.name == "gRPC Generate"
    assert format(request.parent.span_id, "016x") == "b7ad6b7169203331"
    assert {one.name for one in below} == {"place", "queue", "prefill", "decode", "step"}
    (line,) = [one for one in caplog.records if one.name == "router.requests"]
    assert line.fields["num_output_tokens"] == 3  # type: ignore[attr-defined]


async def test_a_conversation_is_the_same_prompt_as_over_http(generated: Any, connect: Any) -> None:
    messages, _ = generated
    edge, channel = await connect(ScriptedReplica())
    said = messages.Conversation(messages=[messages.Message(role="user", content="hello")])

    async for _ in generate(channel, messages, conversation=said, max_tokens=1, seed=3, n=2, logprobs=1):
        pass
    await edge.chat(max_tokens=1, seed=3, n=2, logprobs=True, top_logprobs=1)

    over_grpc, over_http = edge.replica.submits[:2], edge.replica.submits[2:]
    assert [one.prompt_token_ids for one in over_grpc] == [one.prompt_token_ids for one in over_http]
    assert [one.params for one in over_grpc] == [one.params for one in over_http]


async def test_token_ids_stop_strings_and_logprobs(generated: Any, connect: Any) -> None:
    messages, _ = generated
    _, channel = await connect(ScriptedReplica(script=says("one two three")))

    answers = [
        one
        async for one in generate(
            channel,
            messages,
            prompt_token_ids=messages.TokenIds(ids=[104, 105]),
            stop=["two"],
            logprobs=2,
            max_tokens=16,
        )
    ]

    assert "".join(one.text for one in answers) == "one "
    assert next(one.stop_reason for one in answers if one.finish_reason) == "two"
    assert len(answers[0].logprobs[0].top) == 2


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": "a", "temperature": 9.0}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"prompt": "a" * 5000}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "input"),
        ({"prompt": "a", "model": "nobody"}, grpc.StatusCode.NOT_FOUND, "model"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_errors_are_those_of_the_http_api(
    generated: Any, connect: Any, fields: dict[str, Any], status: grpc.StatusCode, param: str
) -> None:
    messages, _ = generated
    _, channel = await connect(ScriptedReplica())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(channel, messages, **fields):
            pass

    assert caught.value.code() is status
    assert dict(caught.value.trailing_metadata() or ())["shoal-param"] == param
    assert caught.value.details()


async def test_full_queues_and_lost_replicas_have_their_status(generated: Any, connect: Any) -> None:
    messages, _ = generated
    _, full = await connect(ScriptedReplica(), limits=Limits(max_waiting_per_replica=0))
    _, empty = await connect(timeouts=Timeouts(replica_wait_s=0.05))

    for channel, status in (
        (full, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (empty, grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(channel, messages, prompt="a"):
                pass
        assert caught.value.code() is status


async def test_a_key_is_asked_for_where_there_are_keys(generated: Any, connect: Any) -> None:
    messages, _ = generated
    _, channel = await connect(ScriptedReplica(), keys=ring_of_keys(["sk-123456"]))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(channel, messages, prompt="a"):
            pass
    allowed = [
        one
        async for one in generate(
            channel, messages, (("authorization", "Bearer sk-123456"),), prompt="a", max_tokens=1
        )
    ]

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert allowed


async def test_a_cancelled_call_cancels_its_request(generated: Any, connect: Any) -> None:
    messages, _ = generated
    edge, channel = await connect(ScriptedReplica(step_s=None, script=says("a" * 99)))
    call = generate(channel, messages, prompt="a", max_tokens=50)
    first = call.__aiter__().__anext__()
    reading = asyncio.ensure_future(first)
    await edge.replica.until(lambda: bool(edge.replica.submits))
    edge.replica.step()
    await reading

    call.cancel()

    await edge.replica.until(lambda: bool(edge.replica.cancelled_ids))
    await edge.until(lambda: edge.replica_set.num_placed == 0)


async def test_with_a_certificate_the_port_speaks_tls_alone(
    generated: Any, make_edge: Any, tmp_path: Path
) -> None:
    messages, _ = generated
    key, certificate = tmp_path / "own.key", tmp_path / "own.crt"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, [*command, *subject, *files], check=True, capture_output=True)
    edge = await make_edge(ScriptedReplica())
    server, port = await start_rpc_server(
        RpcConfig("127.0.0.1", 0, key, certificate), edge.ingress, edge.app.state.metrics, edge.app.state.keys
    )
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())

    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
        assert [one async for one in generate(channel, messages, prompt="a", max_tokens=1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(channel, messages, prompt="a"):
                pass
    await server.stop(None)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_and_reflection_are_the_standard_ones(connect: Any) -> None:
    edge, channel = await connect(ScriptedReplica())
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest())

    assert (
        await health.Check(health_pb2.HealthCheckRequest())
    ).status == health_pb2.HealthCheckResponse.SERVING
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    edge.membership.publish("", {})
    await edge.until(lambda: not edge.replica_set.open_views)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch.cancel()

    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    answer = await ask.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"shoal.inference.v1.Inference", "grpc.health.v1.Health"} <= names
