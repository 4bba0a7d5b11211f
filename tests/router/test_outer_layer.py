"""What stands outside Ray Serve's layers: plain errors become objects, HTTP/1.0 clients get no chunks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp

from router.outer_layer import LOST, OuterLayer
from router.scripted_replica import ScriptedReplica

Listen = Callable[[ASGIApp], Awaitable[int]]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    """Serve an application behind the layer, with the server that Ray Serve has; its port."""
    started: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(app: ASGIApp) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(OuterLayer(app), http="httptools", log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        started.append((server, asyncio.create_task(server.serve(sockets=[listening]))))
        return int(listening.getsockname()[1])

    yield start
    for server, task in started:
        server.should_exit = server.force_exit = True
        await task


async def exchange(port: int, head: str, body: bytes = b"") -> tuple[str, bytes]:
    """Send a request as it stands; head and body of the answer, read until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    told, _, rest = answer.partition(b"\r\n\r\n")
    return told.decode().lower(), rest


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(make_edge: Any, listen: Listen) -> None:
    edge = await make_edge(ScriptedReplica(script=lambda submit: list(b"Hello")))
    port = await listen(edge.app)
    body = b'{"model": "tiny", "prompt": "x", "stream": true, "max_tokens": 5}'

    for wish in ("", "\r\nconnection: keep-alive"):
        head, stream = await exchange(port, f"POST /v1/completions HTTP/1.0{wish}", body)

        assert "transfer-encoding" not in head
        assert head.count("connection: close") == 1
        lines = stream.decode().splitlines()
        assert lines[-2] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines[::2])
        assert not any(lines[1::2])


async def test_a_length_that_is_known_is_told_to_http_1_0_as_ever(listen: Listen) -> None:
    port = await listen(JSONResponse({"a": 1}))

    head, body = await exchange(port, "GET / HTTP/1.0")

    assert "content-length: 7" in head
    assert body == b'{"a":1}'


async def test_chunks_go_to_whoever_knows_them(listen: Listen) -> None:
    port = await listen(StreamingResponse(iter([b"a", b"b"])))

    head, body = await exchange(port, "GET / HTTP/1.1\r\nconnection: close")

    assert "transfer-encoding: chunked" in head
    assert body == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "kind", "code"), [(400, "invalid_request_error", None), (503, "server_error", "no_ingress")]
)
async def test_an_error_in_plain_text_becomes_an_error_object(
    listen: Listen, status: int, kind: str, code: str | None
) -> None:
    port = await listen(PlainTextResponse("Something", status, {"retry-after": "3"}))

    answer = await get(port, "/v1/models")

    assert (answer.status_code, answer.headers["retry-after"]) == (status, "3")
    assert answer.json() == {"error": {"message": "Something", "type": kind, "param": None, "code": code}}


async def test_no_application_yet_is_a_503_that_says_when_to_come_again(listen: Listen) -> None:
    port = await listen(PlainTextResponse("Path '/v1/models' not found. Ping http://.../-/routes", 404))

    answer = await get(port, "/v1/models")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no_ingress"


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
async def test_an_answer_that_never_came_is_an_error_object(
    listen: Listen, has_begun: bool, breaks: bool
) -> None:
    """Serve's proxy returns without a word where the process that had the request was killed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            plain = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 500, "headers": plain})
        if breaks:
            raise RuntimeError("secret detail")

    port = await listen(app)

    answer = await get(port, "/v1/completions")

    assert answer.status_code == 502
    assert answer.json() == {
        "error": {"message": LOST, "type": "server_error", "param": None, "code": "no_ingress"}
    }


def test_both_layers_say_the_same_of_a_process_that_was_lost() -> None:
    errors = Path(__file__).resolve().parents[2] / "deploy" / "haproxy_errors.cfg"

    assert LOST in errors.read_text()


async def test_other_answers_stay_as_they_are(listen: Listen) -> None:
    plain = PlainTextResponse("ok")
    unwell = PlainTextResponse("unwell", 503)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = unwell if scope["path"] == "/-/healthz" else plain
        await answer(scope, receive, send)

    port = await listen(app)

    assert (await get(port, "/")).text == "ok"
    assert (await get(port, "/-/healthz")).text == "unwell"  # proxies ask there


async def get(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")
