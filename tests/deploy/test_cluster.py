"""The whole cluster from outside, through HAProxy, with the clients that users bring."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from deploy.served_cluster import ServedCluster
from deploy.settings import ServeSettings
from router.text.tokenizer import Tokenizer
from workers.checkpoint.source import resolve_model
from workers.checkpoint.vocabulary import load_vocabulary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "smollm2_135m.json").read_text())["cases"]
PROMPT = "Once upon a time there was a"
MESSAGES: Any = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


def complete(client: openai.OpenAI, cluster: ServedCluster, max_tokens: int = 48, **options: Any) -> str:
    answer = client.completions.create(
        model=cluster.model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, **options
    )
    return answer.choices[0].text


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def num_open_replicas(cluster: ServedCluster) -> int:
    models = httpx.get(f"{cluster.url}/health").json()["models"]
    return int(models[cluster.model]["num_open_replicas"])


def engine_sum(cluster: ServedCluster, metric: str) -> float:
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + "{"))


# -- answers ------------------------------------------------------------------------------------------------


def test_a_chat_streams_what_it_answers_whole(client: openai.OpenAI, cluster: ServedCluster) -> None:
    whole = client.chat.completions.create(
        model=cluster.model, messages=MESSAGES, max_tokens=48, temperature=0
    )
    pieces = []
    usage = None
    for event in client.chat.completions.create(
        model=cluster.model,
        messages=MESSAGES,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in event.choices]
        usage = event.usage or usage

    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 48)


def test_the_same_seed_gives_the_same_text_and_choices_differ(
    client: openai.OpenAI, cluster: ServedCluster
) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model=cluster.model, prompt=PROMPT, max_tokens=24, temperature=1.0, seed=7, n=3
        )
        return [choice.text for choice in answer.choices]

    first, second = sample(), sample()

    assert first == second
    assert len(set(first)) == 3


async def test_32_concurrent_streams_give_the_golden_tokens(cluster: ServedCluster) -> None:
    cases = (GOLDENS * 4)[:32]

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=170) as client:

        async def one(case: dict[str, Any]) -> str:
            stream = await client.completions.create(
                model=cluster.model,
                prompt=case["prompt_token_ids"],
                max_tokens=64,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "skip_special_tokens": False},
            )
            return "".join([event.choices[0].text async for event in stream])

        texts = await asyncio.gather(*(one(case) for case in cases))

    tokenizer = Tokenizer(load_vocabulary(resolve_model(None, ServeSettings().source)))
    expected = [tokenizer.decode(case["output_token_ids"], skip_special_tokens=False) for case in cases]
    assert list(texts) == expected


def test_a_prompt_seen_before_is_found_in_the_cache(client: openai.OpenAI, cluster: ServedCluster) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 20

    def cached() -> int:
        answer = client.completions.create(model=cluster.model, prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    cached()

    assert cached() >= 180  # whole blocks of the 200-odd tokens, on whichever replica holds them


# -- bad input ----------------------------------------------------------------------------------------------


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "SmolLM2-135M-Instruct", "messages": MESSAGES, "max_tokens": 4, **changes}


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"[]", 400, None),
        (body(model="nobody"), 404, "model"),
        (body(messages=[]), 400, "messages"),
        (body(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role"),
        (body(temperature="hot"), 400, "temperature"),
        (body(temperature=-1), 400, "temperature"),
        (body(top_p=0), 400, "top_p"),
        (body(n=10_000), 400, "n"),
        (body(max_tokens=-5), 400, "max_tokens"),
        (
            b'{"model":"SmolLM2-135M-Instruct","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
            400,
            None,
        ),
        (body(messages=[{"role": "user", "content": "word " * 5000}]), 400, "messages"),
        (b"x" * (10 << 20), 413, None),
    ],
)
def test_a_bad_request_gets_a_clear_answer(
    cluster: ServedCluster, sent: bytes | dict[str, Any], status: int, param: str | None
) -> None:
    content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()

    answer = httpx.post(
        f"{cluster.url}/v1/chat/completions",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=30,
    )

    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_too_long_a_prompt_is_told_both_numbers(cluster: ServedCluster) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"model": cluster.model, "prompt": list(range(100, 1300))},
        timeout=30,
    )

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "1200" in message.replace(",", "")
    assert "1024" in message.replace(",", "")


def test_an_unknown_path_is_answered_as_json(cluster: ServedCluster) -> None:
    answer = httpx.get(f"{cluster.url}/v1/nothing")

    assert answer.status_code == 404
    assert answer.json()["error"]["message"]
    assert len(answer.headers.get_list("x-request-id")) == 1


# -- clients that leave -------------------------------------------------------------------------------------


@asynccontextmanager
async def raw_stream(
    cluster: ServedCluster, max_tokens: int, http: str = "1.1"
) -> AsyncIterator[asyncio.StreamReader]:
    content = json.dumps(
        {
            "model": cluster.model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    writer.write(
        b"POST /v1/completions HTTP/%s\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (http.encode(), len(content), content)
    )
    try:
        yield reader
    finally:
        writer.transport.abort()


async def test_a_client_of_http_1_0_reads_a_stream_without_chunks(cluster: ServedCluster) -> None:
    async with raw_stream(cluster, max_tokens=4, http="1.0") as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        stream = await reader.read()

    assert b"transfer-encoding" not in head.lower()
    assert all(line.startswith(b"data: ") for line in stream.splitlines() if line)
    assert stream.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_frees_its_request(cluster: ServedCluster) -> None:
    async with raw_stream(cluster, max_tokens=900) as reader:
        await reader.readuntil(b"data: {")
        assert engine_sum(cluster, "shoal_replica_running_requests") >= 1

    await asyncio.to_thread(
        wait_for,
        lambda: engine_sum(cluster, "shoal_replica_running_requests") == 0,
        10,
        "the request of a client that left is gone from the engine",
    )


async def test_a_client_that_reads_nothing_does_not_hold_up_others(
    cluster: ServedCluster, client: openai.OpenAI
) -> None:
    async with raw_stream(cluster, max_tokens=900):
        text = await asyncio.to_thread(complete, client, cluster, 16)

    assert text


# -- kills --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["RankActor", "workers.brain", "ServeReplica:model"])
def test_streams_go_on_when_any_process_of_their_replica_is_killed(
    cluster: ServedCluster, client: openai.OpenAI, word: str
) -> None:
    """One is greedy, one seeded; they have a prompt in common, so they gather at one replica."""
    options: dict[str, Any] = {
        "model": cluster.model, "prompt": PROMPT, "max_tokens": 160, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    samplings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 11}]
    expected = [client.completions.create(**options, **one).choices[0].text for one in samplings]
    wait_for(lambda: num_open_replicas(cluster) == 2, 90, "two replicas are open")
    killed: list[int] = []

    def kill() -> None:
        process = cluster.busiest(word)
        process.kill()
        killed.append(process.pid)

    warm = threading.Barrier(len(samplings), action=kill)

    def stream(sampling: dict[str, Any]) -> str:
        pieces: list[str] = []
        for number, event in enumerate(client.completions.create(stream=True, **options, **sampling)):
            pieces.append(event.choices[0].text)
            if number == 20:
                warm.wait(60)
        return "".join(pieces)

    with ThreadPoolExecutor(len(samplings)) as pool:
        assert list(pool.map(stream, samplings)) == expected
    if word.startswith("ServeReplica"):  # Ray reports no other
        told = f"Process {killed[0]} of the cluster has died; logs:"
        wait_for(lambda: any(line.startswith(told) for line in cluster.log), 30, "it is told in a line")


def test_a_killed_replica_is_replaced(cluster: ServedCluster, client: openai.OpenAI) -> None:
    wait_for(lambda: num_open_replicas(cluster) == 2, 90, "two replicas are open")
    brains = cluster.processes("workers.brain")

    brains[0].kill()

    wait_for(lambda: len(set(cluster.processes("workers.brain")) - set(brains)) == 1, 90, "a new brain runs")
    wait_for(lambda: num_open_replicas(cluster) == 2, 90, "two replicas are open again")
    assert complete(client, cluster)


@pytest.mark.slow
def test_a_replica_that_comes_in_place_of_a_killed_one_takes_from_the_queue_of_the_other(
    cluster: ServedCluster,
) -> None:
    wait_for(lambda: num_open_replicas(cluster) == 2, 90, "two replicas are open")
    brains = cluster.processes("workers.brain")

    def ask(number: int) -> dict[str, Any]:
        body = {"model": cluster.model, "prompt": f"{number} " + 60 * PROMPT, "max_tokens": 2}
        headers = {"X-Shoal-Explain": "1"}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=200)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()["shoal"]["choices"][0]
        return told

    with ThreadPoolExecutor(60) as pool:
        asked = [pool.submit(ask, number) for number in range(60)]
        wait_for(lambda: any(one.done() for one in asked), 90, "one of the requests is answered")
        brains[0].kill()
        told = [one.result() for one in asked]

    assert all(choice["finish_reason"] == "length" for choice in told)
    assert any(choice["num_migrations"] for choice in told), "requests of the killed one went on at the other"
    assert any(choice["num_moves"] for choice in told), "some of them went to the new one"


# -- the machine --------------------------------------------------------------------------------------------


def test_every_socket_of_the_cluster_listens_on_loopback(cluster: ServedCluster) -> None:
    pids = {process.pid for process in cluster.runtime.processes()} | {cluster.process.pid}

    listening = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.pid in pids]

    assert any(one.laddr.port == cluster.port for one in listening)
    assert {one.laddr.ip for one in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert 52365 not in {one.laddr.port for one in listening}, "Ray's agent has the port of another cluster's"
