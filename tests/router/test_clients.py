"""Real clients on real sockets: the official one, ones that leave, ones that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import quote

import httpx
import openai
import pytest

from deploy.setting_values import MOST_NAME_CHARS, checked_name
from router.config import Limits
from router.scripted_replica import ScriptedReplica


def says(text: str):
    return lambda submit: list(text.encode())


def official(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def raw_request(num_tokens: int, *, stream: bool) -> bytes:
    body = json.dumps(
        {"model": "tiny", "stream": stream, "max_tokens": num_tokens, "prompt": "hello", "ignore_eos": True}
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def test_the_official_client_chats(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("Hello, wörld")))
    async with official(await edge.listen()) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
        )
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    assert whole.choices[0].message.content == "Hello, wörld"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, wörld"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None


async def test_the_official_client_completes_lists_and_fails_by_class(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(script=says("abc")))
    async with official(await edge.listen()) as client:
        completion = await client.completions.create(model="tiny", prompt=["x", "y"], max_tokens=3, n=2)
        streamed = await client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in streamed])
        models = [model.id async for model in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="x", temperature=7)

    assert [choice.text for choice in completion.choices] == ["abc"] * 4
    assert text == "abc"
    assert models == ["tiny", "alias"]
    assert refused.value.param == "temperature"


async def test_each_name_that_is_listed_is_found_and_served(make_edge) -> None:
    names = ("modèle", "org/模型 50%", "a?b#c", "x+y&z=%2F", "ü" * MOST_NAME_CHARS)
    edge = await make_edge(ScriptedReplica(script=says("abc")), served={"names": names})
    url = await edge.listen()
    async with official(url) as client, httpx.AsyncClient(base_url=url) as http:
        listed = [model.id async for model in client.models.list()]
        found = [(await http.get(f"/v1/models/{quote(name, safe=safe)}")).json()["id"] for name, safe in
                 [(name, safe) for name in listed for safe in ("", "/")]]  # fmt: skip
        answers = [(await client.completions.create(model=name, prompt="x")).model for name in listed]

    assert tuple(map(checked_name, names)) == names == tuple(listed)
    assert found == [name for name in names for _ in range(2)]
    assert answers == listed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(make_edge, stream: bool) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None, script=says("a" * 999)))
    url = httpx.URL(await edge.listen())
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(raw_request(900, stream=stream))
    await edge.replica.until(lambda: bool(edge.replica.submits))
    edge.replica.step()

    writer.close()

    await edge.replica.until(lambda: edge.replica.cancelled_ids == [edge.replica.submits[0].request_id])
    await edge.until(lambda: edge.replica_set.num_placed == 0)


async def test_a_client_that_leaves_while_no_replica_is_there_is_forgotten(make_edge) -> None:
    edge = await make_edge()
    url = httpx.URL(await edge.listen())
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(raw_request(9, stream=True))
    await edge.until_metric('shoal_requests_in_flight{model="tiny"} 1.0')

    writer.close()

    await edge.until_metric('shoal_requests_in_flight{model="tiny"} 0.0')


async def test_a_client_that_leaves_while_sending_is_no_error_of_ours(make_edge) -> None:
    edge = await make_edge()
    url = httpx.URL(await edge.listen())
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(raw_request(9, stream=True)[:-5])
    await writer.drain()

    writer.close()

    await edge.until_metric('shoal_http_requests_total{route="/v1/completions",status="499"} 1.0')


async def test_a_client_that_does_not_read_is_cancelled_and_hurts_nobody(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(script=says("a" * 400_000)),
        limits=Limits(max_unread_outputs=500),
        max_model_len=500_000,
    )
    url = httpx.URL(await edge.listen())
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(slow, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=slow, limit=1024)
    writer.write(raw_request(300_000, stream=True))
    await edge.replica.until(lambda: bool(edge.replica.submits))

    other = await edge.complete(max_tokens=5)
    assert other.json()["choices"][0]["text"] == "aaaaa"
    await edge.replica.until(lambda: bool(edge.replica.cancelled_ids))

    text = b""
    while b"too slowly" not in text:  # once it reads again it is told
        piece = await reader.read(65536)
        assert piece
        text = text[-200:] + piece
    writer.close()


async def test_answers_carry_the_clients_request_id_or_a_new_one(make_edge) -> None:
    edge = await make_edge()

    own = await edge.client.get("/health/live", headers={"x-request-id": "my-id.1"})
    bad = await edge.client.get("/health/live", headers={"x-request-id": "two words"})

    assert own.headers["x-request-id"] == "my-id.1"
    assert len(bad.headers["x-request-id"]) == 32


async def test_health_follows_the_replicas(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"min_replicas": 2})
    assert (await edge.client.get("/health/live")).status_code == 200
    ready = await edge.client.get("/health")
    assert ready.status_code == 200
    assert ready.json()["models"]["tiny"] == {
        "status": "ready",
        "min_replicas": 2,
        "num_replicas": 1,
        "num_open_replicas": 1,
        "membership_version": edge.membership.version(""),
        "num_requests": 0,
    }

    edge.membership.publish("", {})
    await edge.until(lambda: not edge.replica_set.open_views)

    gone = await edge.client.get("/health")
    assert (gone.status_code, gone.json()["status"]) == (503, "unavailable")
    assert (await edge.client.get("/health/live")).status_code == 200


async def test_a_model_that_sleeps_can_be_served(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), served={"scales_to_zero": True})
    edge.membership.publish("", {})
    await edge.until(lambda: not edge.replica_set.open_views)

    answer = await edge.client.get("/health")

    assert answer.status_code == 200
    assert answer.json()["models"]["tiny"]["status"] == "asleep"


async def test_metrics_count_requests_tokens_and_show_the_replicas_load(make_edge) -> None:
    replica = ScriptedReplica(script=says("abcde"))
    replica.load.kv_waste = 0.03
    edge = await make_edge(replica)
    await edge.complete(max_tokens=5)
    await edge.complete(temperature=9)

    text = (await edge.client.get("/metrics")).text

    for line in (
        'shoal_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'shoal_http_requests_total{route="/v1/completions",status="400"} 1.0',
        'shoal_output_tokens_total{model="tiny"} 5.0',
        'shoal_prompt_tokens_total{model="tiny"} 5.0',
        'shoal_requests_in_flight{model="tiny"} 0.0',
        'shoal_router_placements_total{model="tiny"} 1.0',
        'shoal_replica_kv_waste_ratio{model="tiny",replica="replica-0"} 0.03',
        'shoal_replica_steps_total{model="tiny",replica="replica-0"} 5.0',
        'shoal_time_to_first_token_seconds_count{model="tiny"} 1.0',
    ):
        assert line in text.splitlines()


async def test_the_openapi_document_describes_bodies(make_edge) -> None:
    edge = await make_edge()

    document = (await edge.client.get("/openapi.json")).json()

    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    assert schemas["ChatBody"]["properties"]["messages"]["items"] == {
        "$ref": "#/components/schemas/ChatMessage"
    }
    assert "temperature" in schemas["CompletionBody"]["properties"]
