"""Early answers: the next request on the connection must not be taken for the rest of the body."""

from __future__ import annotations

import asyncio

import pytest

from router import unread_body
from router.edge import EdgeMiddleware
from router.openai import body
from router.scripted_replica import ScriptedReplica

HEAD = b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


async def open_connection(edge) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = await edge.listen()
    return await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))


@pytest.mark.parametrize("path", [b"/nope", b"/v1/models"], ids=["not found", "wrong method"])
async def test_an_early_answer_waits_for_the_rest_of_a_short_body(make_edge, path: bytes) -> None:
    edge = await make_edge(ScriptedReplica())
    reader, writer = await open_connection(edge)

    writer.write(HEAD.replace(b"/nope", path) % 14)
    await writer.drain()
    writer.write(b'{"prompt":"a"}' + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    first = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"}}")
    second = await reader.readuntil(b"\r\n\r\n")

    assert first.split()[1] in (b"404", b"405")
    assert b"connection: close" not in first.lower()
    assert second.split()[1] == b"200"
    writer.close()


async def test_a_connection_whose_body_does_not_come_is_closed_with_the_answer(
    make_edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_body, "MOST_S", 0.01)
    edge = await make_edge(ScriptedReplica())
    reader, writer = await open_connection(edge)

    writer.write(HEAD % 1000)
    answer = await reader.read()  # to the end: the server hangs up

    assert answer.split()[1] == b"404"
    assert b"connection: close" in answer.lower()
    writer.close()


async def test_a_rest_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_body, "MOST_BYTES", 100)
    sent, num_read = [], 0

    async def receive() -> dict:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"transfer-encoding", b"chunked")]}
    await EdgeMiddleware(app, lambda route, status: None)(scope, receive, send)

    assert (b"connection", b"close") in sent[0]["headers"]
    assert num_read == 2


async def test_a_body_that_drips_is_given_up(make_edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_S", 0.1)
    monkeypatch.setattr(unread_body, "MOST_S", 0.1)
    edge = await make_edge(ScriptedReplica())
    reader, writer = await open_connection(edge)

    writer.write(HEAD.replace(b"/nope", b"/v1/completions") % 9999 + b"{")
    answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_too_slow"' in answer
    assert b"connection: close" in answer.lower()
    writer.close()
