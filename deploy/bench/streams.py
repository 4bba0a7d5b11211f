"""Streams to compare with each other: the same requests again and again, and what came of each, by the clock."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from deploy.lines import LineCutter

WARM_CHUNKS = 8
"""Chunks after which a stream counts as under way."""
_WARM_TIMEOUT_S = 120.0
MAX_PROMPT_LEN = 32
"""Tokens that no prompt of a stream exceeds."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The load of each round."""

    num_streams: int
    output_len: int
    temperature: float
    """Of every second stream; the others are greedy."""


@dataclass(slots=True)
class StreamRecord:
    """What one stream brought."""

    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    is_done: bool = False
    has_ended: bool = False
    num_moves: int = 0
    """Times that it went on at another replica."""

    @property
    def longest_gap_s(self) -> float:
        """Between two chunks."""
        times = self.arrivals_s
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


async def run_streams(
    client: httpx.AsyncClient, url: str, model: str, plan: StreamPlan
) -> list[StreamRecord]:
    """All streams of the plan at once, each to its end."""
    records = [StreamRecord() for _ in range(plan.num_streams)]
    await asyncio.gather(
        *(
            _run_stream(client, url, _body(model, plan, number), record)
            for number, record in enumerate(records)
        )
    )
    return records


async def run_streams_beside(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    plan: StreamPlan,
    event: Callable[[list[list[StreamRecord]]], Awaitable[None]],
) -> list[list[StreamRecord]]:
    """Keep all streams of the plan under way while something happens, however long it takes.

    Args:
        event: what happens; begins once each stream is under way, and is told of the runs so far.

    Returns:
        Of each stream its runs: it is asked for again when it has ended before ``event`` has. One that broke is not.
    """
    runs: list[list[StreamRecord]] = [[] for _ in range(plan.num_streams)]
    warm, is_over = asyncio.Event(), asyncio.Event()

    def on_chunk() -> None:
        if all(len(own) > 1 or (own and len(own[0].arrivals_s) >= WARM_CHUNKS) for own in runs):
            warm.set()

    async def repeat(number: int) -> None:
        is_done = True
        while is_done and not is_over.is_set():
            record = StreamRecord()
            runs[number].append(record)
            await _run_stream(client, url, _body(model, plan, number), record, on_chunk)
            is_done = record.is_done

    streams = [asyncio.create_task(repeat(number)) for number in range(plan.num_streams)]
    try:
        await asyncio.wait_for(warm.wait(), _WARM_TIMEOUT_S)
        await event(runs)
        is_over.set()
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return runs


def _body(model: str, plan: StreamPlan, number: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"Story number {number}. Once upon a time there was a",
        "max_tokens": plan.output_len,
        "temperature": plan.temperature if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }


async def _run_stream(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    record: StreamRecord,
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    headers = {"X-Shoal-Explain": "1"}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            cutter = LineCutter()
            async for piece in answer.aiter_bytes():
                for line in cutter.feed(piece):
                    if line == "data: [DONE]":
                        record.is_done = answer.status_code == 200
                    elif line.startswith("data: {"):
                        _take(orjson.loads(line[len("data: ") :]), record)
                        on_chunk()
    except httpx.HTTPError:
        return  # it has not ended properly, which is what is counted
    finally:
        record.has_ended = True


def _take(event: dict[str, Any], record: StreamRecord) -> None:
    told = event.get("shoal")
    if told is not None:
        record.num_moves = sum(choice["num_migrations"] for choice in told["choices"])
        return
    record.text += "".join(choice["text"] for choice in event.get("choices") or [])
    record.arrivals_s.append(time.monotonic())
