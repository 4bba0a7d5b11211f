"""Load on an OpenAI endpoint from one process: raw sockets, so that the client costs little of what it measures.

Closed loop: each connection sends a streamed completion, reads it to the end, and sends the next.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from deploy.bench.random_prompts import random_prompt
from deploy.bench.report import percentile

_EVENT = b"data: {"
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent."""

    url: str
    """``http://host:port/v1``."""
    model: str
    num_streams: int
    requests_per_stream: int
    input_len: int
    output_len: int
    vocab_size: int = 40000
    seed: int = 0
    """Of the prompts: equal ones are answered from the cache."""
    api_key: str | None = None
    spread: int = 0
    """Lengths of prompts are drawn from ``input_len - spread .. input_len``."""


@dataclass(slots=True)
class StreamTimes:
    """Of one request, in seconds from sending it."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    is_done: bool = False
    """The stream came to its proper end."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Times in milliseconds."""

    num_streams: int
    num_requests: int
    num_failed: int
    num_chunks: int
    """Chunks with text; a token that only begins a character brings none of its own."""
    wall_s: float
    chunks_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    request_p50_s: float
    request_p99_s: float


async def run_load(plan: LoadPlan) -> LoadResult:
    """Send the plan's requests and time every chunk.

    Raises:
        OSError: the endpoint cannot be reached.
    """
    started_s = time.perf_counter()
    per_stream = await asyncio.gather(*(_stream(plan, number) for number in range(plan.num_streams)))
    wall_s = time.perf_counter() - started_s
    times = [one for stream in per_stream for one in stream]
    good = [one for one in times if len(one.arrivals_s) > 1]
    gaps = [b - a for one in good for a, b in zip(one.arrivals_s, one.arrivals_s[1:], strict=False)]
    firsts = [one.arrivals_s[0] - one.sent_s for one in good]
    whole = [one.arrivals_s[-1] - one.sent_s for one in good]
    num_chunks = sum(len(one.arrivals_s) for one in times)
    return LoadResult(
        num_streams=plan.num_streams,
        num_requests=len(times),
        num_failed=sum(not one.is_done for one in times),
        num_chunks=num_chunks,
        wall_s=round(wall_s, 3),
        chunks_per_s=round(num_chunks / wall_s, 1),
        ttft_p50_ms=round(1e3 * percentile(firsts, 0.5), 2) if firsts else 0.0,
        ttft_p99_ms=round(1e3 * percentile(firsts, 0.99), 2) if firsts else 0.0,
        inter_token_p50_ms=round(1e3 * percentile(gaps, 0.5), 2) if gaps else 0.0,
        inter_token_p99_ms=round(1e3 * percentile(gaps, 0.99), 2) if gaps else 0.0,
        request_p50_s=round(percentile(whole, 0.5), 3) if whole else 0.0,
        request_p99_s=round(percentile(whole, 0.99), 3) if whole else 0.0,
    )


async def _stream(plan: LoadPlan, number: int) -> list[StreamTimes]:
    rng = random.Random(f"{plan.seed} {number}")
    return [await run_request(plan, rng) for _ in range(plan.requests_per_stream)]


async def run_request(plan: LoadPlan, rng: random.Random) -> StreamTimes:
    """Send one streamed completion of a random prompt, and read it to its end.

    Raises:
        OSError: the endpoint cannot be reached.
    """
    parts = urlsplit(plan.url)
    input_len = rng.randint(plan.input_len - plan.spread, plan.input_len)
    body = json.dumps(
        {
            "model": plan.model,
            "prompt": random_prompt(rng, plan.vocab_size, input_len),
            "max_tokens": plan.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    key = f"Authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    head = (
        f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"{key}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return await _read_stream(parts.hostname or "127.0.0.1", parts.port or 80, head + body)


async def _read_stream(host: str, port: int, request: bytes) -> StreamTimes:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    times = StreamTimes(time.perf_counter())
    writer.write(request)
    tail = b""
    try:
        while data := await reader.read(1 << 16):
            now_s = time.perf_counter()
            text = tail + data
            found = text.count(_EVENT)
            times.arrivals_s.extend([now_s] * found)
            # Keep what may be the beginning of an event cut in two; a whole one has been counted.
            keep = max(len(_EVENT), len(_DONE)) - 1
            tail = text[max(len(text) - keep, text.rfind(_EVENT) + len(_EVENT) if found else 0) :]
            if _DONE in text:
                times.is_done = True
                break
    finally:
        writer.close()
    return times
