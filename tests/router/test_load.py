"""Many requests of all kinds at once, and hostile ones: each is answered or refused, in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
import random
import time
import tracemalloc
from typing import Any

import httpx
import pytest

from router.config import Limits
from router.scripted_replica import ScriptedReplica

MIB = 1 << 20


def counting(submit: Any) -> list[int]:
    """Letters that depend on the request, so that mixed-up answers show."""
    first = submit.prompt_token_ids[-1]
    return [97 + (first + position) % 26 for position in range(submit.params.max_tokens)]


def wanted(last_byte: int, num_tokens: int) -> str:
    return "".join(chr(97 + (last_byte + position) % 26) for position in range(num_tokens))


async def ask(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """One request of one of several kinds; what was wrong with its answer, or nothing."""
    last, num_tokens = 65 + number % 26, 3 + number % 12
    body: dict[str, Any] = {
        "model": "tiny", "prompt": "x" * (number % 50) + chr(last), "max_tokens": num_tokens, "ignore_eos": True,
    }  # fmt: skip
    kind = number % 6
    if kind == 0:
        answer = await client.post("/v1/completions", json=body)
        found = answer.json()["choices"][0]["text"]
    elif kind == 1:
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        found = text
    elif kind == 2:
        answer = await client.post("/v1/completions", json={**body, "n": 3})
        texts = {choice["text"] for choice in answer.json()["choices"]}
        found = texts.pop() if len(texts) == 1 else str(texts)
    elif kind == 3:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line and rng.random() < 0.3:
                    return ""  # leave in the middle
        return ""
    elif kind == 4:
        answer = await client.post("/v1/completions", json={**body, "temperature": 99})
        return "" if answer.status_code == 400 else f"{number}: {answer.status_code}"
    else:
        answer = await client.post("/v1/embeddings", json={"model": "tiny", "input": body["prompt"]})
        return "" if answer.status_code == 200 else f"{number}: {answer.text}"
    expected = wanted(last, num_tokens)
    return "" if found == expected else f"{number}: {found!r} for {expected!r}"


async def test_128_mixed_requests_at_once_get_their_own_answers(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=counting), ScriptedReplica(script=counting))
    url = await edge.listen()
    rng = random.Random(0)

    async with httpx.AsyncClient(
        base_url=url, timeout=60, limits=httpx.Limits(max_connections=128)
    ) as client:
        wrong = await asyncio.gather(*(ask(client, number, rng) for number in range(128)))

    assert [one for one in wrong if one] == []
    await edge.until(lambda: edge.replica_set.num_placed == 0)
    await edge.until(lambda: all(replica.num_running == 0 for replica in edge.replicas))
    await edge.until_metric('shoal_requests_in_flight{model="tiny"} 0.0')


async def timed(work: Any) -> tuple[Any, float, int]:
    """The answer, the seconds it took, and the most bytes of memory it took above what was there."""
    tracemalloc.start()
    started_s = time.perf_counter()
    try:
        answer = await work
        return answer, time.perf_counter() - started_s, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "a", **fields}).encode()


HOSTILE: list[tuple[str, bytes, int]] = [
    ("1 MB of one word", body_of(prompt="a" * MIB), 400),
    ("1 MB of spaces", b" " * MIB + body_of(max_tokens=1), 200),
    ("1 MB of brackets", b"[" * MIB, 400),
    ("1 MB of token ids", body_of(prompt=[1] * (MIB // 3)), 400),
    ("1 MB of things that are no token ids", body_of(prompt=[1, *({} for _ in range(MIB // 4))]), 400),
    ("1 MB of unknown fields", body_of(**{f"f{i}": i for i in range(MIB // 16)}), 400),
    ("1 MB of bias", body_of(logit_bias={str(i): 1 for i in range(MIB // 12)}), 400),
    ("1 MB of wrong stop strings", body_of(stop=[1] * (MIB // 3)), 400),
    ("10,000 stop strings", body_of(stop=[f"s{i}" for i in range(10_000)]), 400),
    ("10,000 stop tokens", body_of(stop_token_ids=[1] * 10_000), 400),
    ("broken UTF-8", b'{"model": "tiny", "prompt": "\xff\xfe\xc3\x28"}', 400),
    ("half a surrogate", b'{"model": "tiny", "prompt": "\\ud83d"}', 400),
    ("overlong UTF-8", b'{"model": "tiny", "prompt": "\xc0\xaf\xe0\x80\xaf"}', 400),
    ("a number of 100,000 digits", b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}", 400),
]


@pytest.mark.parametrize(("name", "body", "status"), HOSTILE, ids=[row[0] for row in HOSTILE])
async def test_a_hostile_body_is_dealt_with_in_bounded_time_and_memory(
    make_edge, name: str, body: bytes, status: int
) -> None:
    edge = await make_edge(ScriptedReplica())

    answer, took_s, num_bytes = await timed(edge.client.post("/v1/completions", content=body))

    assert answer.status_code == status, answer.text[:300]
    assert len(answer.content) < 4096
    assert took_s < 3.0
    assert num_bytes < 64 * MIB


async def test_10_000_stop_candidates_cost_a_stream_little(make_edge) -> None:
    # As many as allowed, each as long as allowed, all beginning as the text does: every token is a candidate.
    limits = Limits()
    stops = ["ab" * (limits.max_stop_chars // 2 - 1) + f"{i:02d}" for i in range(limits.max_stop_strings)]
    num_tokens = 10_000
    text = "ab" * (num_tokens // 2)
    edge = await make_edge(ScriptedReplica(script=lambda submit: list(text.encode())), max_model_len=20_000)

    started_s = time.perf_counter()
    answer = await edge.complete(stop=stops, max_tokens=num_tokens)
    took_s = time.perf_counter() - started_s

    assert answer.json()["choices"][0]["text"] == text
    assert took_s < 30.0


async def test_bytes_that_are_no_text_never_break_a_stream(make_edge) -> None:
    rng = random.Random(1)
    noise = [rng.randrange(256) for _ in range(2000)]
    edge = await make_edge(ScriptedReplica(script=lambda submit: noise))

    whole = (await edge.complete(max_tokens=2000)).json()["choices"][0]["text"]
    streamed = (await edge.complete(max_tokens=2000, stream=True)).text

    pieces = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(pieces) == whole == bytes(noise).decode("utf-8", "replace")
