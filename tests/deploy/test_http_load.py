"""The load client counts every event once, however the bytes are cut."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deploy.bench.http_command import http
from deploy.bench.http_load import LoadPlan, run_load
from deploy.client import ClientError


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 8, 13, 1000])
async def test_events_are_counted_however_they_are_cut(cut: int) -> None:
    events = b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"x": "data"}\n\n' * 9 + b"data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(events), cut):
            writer.write(events[start : start + cut])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    result = await run_load(LoadPlan(f"http://127.0.0.1:{port}/v1", "m", 2, 3, 4, 9))

    assert (result.num_requests, result.num_failed, result.num_chunks) == (6, 0, 54)
    server.close()


async def test_a_stream_that_breaks_off_counts_as_failed() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"a": 1}\n\n')
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    result = await run_load(LoadPlan(f"http://127.0.0.1:{port}/v1", "m", 1, 2, 4, 9))

    assert (result.num_requests, result.num_failed) == (2, 2)
    server.close()


async def test_the_command_sends_no_prompt_twice() -> None:
    prompts: list[list[int]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        prompts.append(json.loads(await reader.readexactly(length))["prompt"])
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"x": "data"}\n\n' * 2 + b"data: [DONE]\n\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    await asyncio.to_thread(http, f"http://127.0.0.1:{port}/v1", "m", "2,3", 2, 16, 9, None)

    assert len(prompts) == 5 * (1 + 2)  # a round to warm up, then two, each with 2 and with 3 streams
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    server.close()


@pytest.mark.parametrize("path", ["/v1", ""])
async def test_a_load_of_which_all_fails_is_an_error_and_no_figure(path: str, tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = tmp_path / "found.json"

    with pytest.raises(
        ClientError, match=f"all 4 requests to http://127.0.0.1:{port}/v1 for model 'm' failed"
    ):
        await asyncio.to_thread(http, f"http://127.0.0.1:{port}{path}", "m", "2", 2, 16, 9, found)

    assert set(asked) == {b"POST /v1/completions HTTP/1.1\r\n"}
    assert not found.exists()
    server.close()
