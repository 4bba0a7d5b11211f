"""What surrounds every answer: ids, headers, comments on silent streams, and the plain endpoints."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from router.config import Limits, Timeouts
from router.openai.heartbeat import SILENCE_S
from router.scripted_replica import ScriptedReplica


def says(text: str):
    return lambda submit: list(text.encode())


class ManualSleep:
    """Sleeps that end when the test says so."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self._sleepers: list[asyncio.Future[None]] = []

    async def __call__(self, delay_s: float) -> None:
        self.asked_s.append(delay_s)
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        await sleeper

    def pass_time(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    @property
    def num_sleepers(self) -> int:
        return sum(not sleeper.done() for sleeper in self._sleepers)


async def lines_of(edge: Any, body: dict[str, Any], lines: list[str]) -> None:
    """Read a stream from a real socket, line by line as it comes."""
    url = await edge.listen()
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", **body}
        ) as answer,
    ):
        lines.append(str(answer.status_code))
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)


async def test_a_stream_that_waits_sends_a_comment_every_15_seconds(make_edge) -> None:
    sleep = ManualSleep()
    edge = await make_edge(ScriptedReplica(step_s=None, script=says("abc")), sleep=sleep)
    lines: list[str] = []
    reader = asyncio.create_task(lines_of(edge, {"stream": True, "max_tokens": 2}, lines))
    await edge.until(lambda: sleep.num_sleepers == 1 and bool(edge.replica.submits))

    for expected in (["200", ": waiting"], ["200", ": waiting", ": waiting"]):
        sleep.pass_time()
        await edge.until(lambda expected=expected: lines == expected)
    edge.replica.step()
    edge.replica.step()
    await reader

    assert lines[-1] == "data: [DONE]"
    assert set(sleep.asked_s) == {SILENCE_S} == {15.0}


async def test_a_stream_that_speaks_needs_no_comment(make_edge) -> None:
    sleep = ManualSleep()
    edge = await make_edge(ScriptedReplica(step_s=None, script=says("abcdef")), sleep=sleep)
    lines: list[str] = []
    reader = asyncio.create_task(lines_of(edge, {"stream": True, "max_tokens": 5}, lines))
    await edge.until(lambda: sleep.num_sleepers == 1 and bool(edge.replica.submits))

    for num_lines in (2, 3, 4, 5):
        edge.replica.step()
        await edge.until(lambda num_lines=num_lines: len(lines) == num_lines)
        sleep.pass_time()
        await edge.until(lambda: sleep.num_sleepers == 1)
    edge.replica.step()
    await reader

    assert not [line for line in lines if line.startswith(":")]


async def test_an_error_after_a_comment_is_an_event_without_done(make_edge) -> None:
    sleep = ManualSleep()
    edge = await make_edge(timeouts=Timeouts(replica_wait_s=0.3), sleep=sleep)
    lines: list[str] = []
    reader = asyncio.create_task(lines_of(edge, {"stream": True}, lines))
    await edge.until(lambda: sleep.num_sleepers == 1)

    sleep.pass_time()
    await reader

    assert lines[:2] == ["200", ": waiting"]
    assert lines[2].startswith('data: {"error":{"message":"no replica of the model')
    assert len(lines) == 3


async def test_an_error_before_any_event_has_its_status(make_edge) -> None:
    edge = await make_edge(timeouts=Timeouts(replica_wait_s=0.05))

    response = await edge.complete(stream=True)

    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
    assert int(response.headers["retry-after"]) >= 1


async def test_who_does_not_stream_waits_for_a_replica_and_is_told_when_to_come_again(make_edge) -> None:
    woken: list[str] = []
    edge = await make_edge(timeouts=Timeouts(replica_wait_s=0.2))
    edge.replica_set._wake = lambda: woken.append("m")

    started_s = asyncio.get_running_loop().time()
    response = await edge.complete()
    waited_s = asyncio.get_running_loop().time() - started_s

    assert response.status_code == 503
    assert 0.2 <= waited_s < 5.0
    assert int(response.headers["retry-after"]) >= 1
    assert woken  # a model at zero was asked to start


async def test_a_stream_asks_proxies_not_to_hold_it_back(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await edge.complete(stream=True, max_tokens=1)

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_every_answer_has_one_request_id(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    for response in (
        await edge.complete(max_tokens=1),
        await edge.complete(temperature=9),
        await edge.client.get("/nothing"),
        await edge.client.put("/v1/models"),
    ):
        assert len(response.headers.get_list("x-request-id")) == 1


async def test_a_bug_is_a_500_with_an_error_object_and_the_request_id(make_edge, caplog) -> None:
    edge = await make_edge()

    @edge.app.get("/bug")
    async def bug() -> None:
        raise RuntimeError("secret detail")

    response = await edge.client.get("/bug", headers={"x-request-id": "find-me"})

    assert response.status_code == 500
    assert response.json() == {
        "error": {"message": "internal error", "type": "server_error", "param": None, "code": None}
    }
    assert response.headers["x-request-id"] == "find-me"
    assert "find-me" in caplog.text
    await edge.until_metric('shoal_http_requests_total{route="/bug",status="500"} 1.0')


async def test_a_wrong_method_says_what_is_allowed(make_edge) -> None:
    edge = await make_edge()

    response = await edge.client.get("/v1/chat/completions")

    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_a_script_in_a_browser_may_call_and_read_the_headers(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    page = {"origin": "https://page.example"}

    asked = await edge.client.options(
        "/v1/chat/completions",
        headers={
            **page,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    answered = await edge.client.get("/v1/models", headers=page)

    assert asked.status_code == 200
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert answered.headers["access-control-allow-origin"] == "*"
    assert "x-ratelimit-remaining-requests" in answered.headers["access-control-expose-headers"]


async def test_answers_say_how_many_requests_still_fit(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), limits=Limits(max_waiting_per_replica=3))
    waiting = [asyncio.create_task(edge.complete(max_tokens=1)) for _ in range(2)]
    await edge.replica.until(lambda: len(edge.replica.submits) == 2)

    headers = (await edge.client.get("/v1/models")).headers

    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-reset-requests"].endswith("ms")
    assert "x-ratelimit-limit-requests" not in (await edge.client.get("/health")).headers
    edge.replica.step()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/v1/batches", "shoal run-batch"),
        ("POST", "/v1/files", "shoal run-batch"),
        ("GET", "/v1/files/file-1/content", "shoal run-batch"),
        ("POST", "/v1/audio/speech", "served are"),
        ("POST", "/v1/images/generations", "served are"),
        ("POST", "/v1/assistants", "served are"),
        ("POST", "/v1/moderations", "served are"),
        ("POST", "/v1/fine_tuning/jobs", "/v1/chat/completions"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/completion", "did you mean /v1/completions?"),
        ("GET", "/" + "x" * 3000, "served are"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_an_unknown_path_is_told_what_is_served(make_edge, method: str, path: str, says: str) -> None:
    edge = await make_edge()

    response = await edge.client.request(method, path, json={"model": "tiny"} if method == "POST" else None)

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "unknown_url", None)
    assert says in error["message"]
    assert len(error["message"]) < 700


async def test_what_is_served_is_told_whole(make_edge) -> None:
    edge = await make_edge()

    message = (await edge.client.get("/nothing-like-it")).json()["error"]["message"]

    served = message.split("served are ")[1].split(", ")
    assert {"/ui", "/docs", "/openapi.json", "/metrics", "/v1/chat/completions"} <= set(served)
    assert {"/v1/shoal/requests/{request_id}", "/v1/responses/{response_id}"} <= set(served)
    assert "/ui/data" not in served


async def test_too_many_requests_say_when_to_come_again(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None), limits=Limits(max_waiting_per_replica=1))
    waiting = asyncio.create_task(edge.complete(max_tokens=1))
    await edge.replica.until(lambda: len(edge.replica.submits) == 1)

    refused = await edge.complete()

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    edge.replica.step()
    await waiting


async def test_the_version_is_that_of_the_package(make_edge) -> None:
    edge = await make_edge()

    assert (await edge.client.get("/version")).json() == {"version": version("shoal")}


async def test_the_load_counts_requests_under_way(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(step_s=None))
    running = asyncio.create_task(edge.complete(max_tokens=1))
    await edge.replica.until(lambda: bool(edge.replica.submits))

    load = (await edge.client.get("/load")).json()

    assert load["server_load"] == load["models"]["tiny"]["num_requests"] == 1
    edge.replica.step()
    await running
    assert (await edge.client.get("/load")).json()["server_load"] == 0


async def test_deep_health_runs_a_token(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())

    response = await edge.client.get("/health?deep=1")

    assert response.status_code == 200
    assert response.json()["models"]["tiny"]["token_s"] > 0
    assert [submit.params.max_tokens for submit in edge.replica.submits] == [1]


async def test_deep_health_fails_where_no_token_comes(make_edge, monkeypatch) -> None:
    monkeypatch.setattr("router.openai.health.DEEP_TIMEOUT_S", 0.1)
    edge = await make_edge(ScriptedReplica(step_s=None))

    response = await edge.client.get("/health?deep=1")

    assert response.status_code == 503
    assert response.json()["models"]["tiny"]["status"] == "stuck"
    await edge.replica.until(lambda: bool(edge.replica.cancelled_ids))


async def test_a_wrong_query_is_a_400_by_name(make_edge) -> None:
    edge = await make_edge()

    response = await edge.client.get("/health?deep=perhaps")

    assert (response.status_code, response.json()["error"]["param"]) == (400, "deep")


async def test_a_model_is_as_long_as_its_smallest_replica(make_edge) -> None:
    edge = await make_edge(
        ScriptedReplica(max_model_len=300), ScriptedReplica(max_model_len=200), max_model_len=4096
    )

    shown = (await edge.client.get("/v1/models/tiny")).json()
    refused = await edge.complete(prompt="a" * 150, max_tokens=100)

    assert shown["max_model_len"] == 200
    assert refused.status_code == 400
    assert "200" in refused.json()["error"]["message"]


async def test_text_is_tokenized_and_back(make_edge) -> None:
    edge = await make_edge()

    told = (
        await edge.client.post(
            "/tokenize", json={"model": "tiny", "prompt": "wö<|end|>", "return_token_strs": True}
        )
    ).json()
    back = (await edge.client.post("/detokenize", json={"tokens": told["tokens"]})).json()

    assert told["tokens"] == [*"wö".encode(), 257]
    assert (told["count"], told["max_model_len"]) == (4, 4096)
    assert told["token_strs"][-1] == "<|end|>"
    assert back == {"prompt": "wö<|end|>"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low"},
    ],
    ids=str,
)
async def test_a_conversation_is_tokenized_as_chat_does(make_edge, fields: dict[str, Any]) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ mood }}{{ reasoning_effort }}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    edge = await make_edge(ScriptedReplica(), served={"chat_template": template})
    messages = [{"role": "user", "content": "hello"}]

    told = (await edge.client.post("/tokenize", json={"messages": messages, **fields})).json()
    await edge.chat(messages=messages, max_tokens=1, **fields)

    assert told["tokens"] == list(edge.replica.submits[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, 400),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, 400),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("/detokenize", {"tokens": [999]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
)
async def test_a_wrong_question_about_tokens_is_refused(make_edge, path: str, body: Any, status: int) -> None:
    edge = await make_edge()

    response = await edge.client.post(path, json=body)

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": False},
        {"prompt": "a", "add_generation_prompt": False, "tools": []},
    ],
)
async def test_what_a_question_about_tokens_does_not_ask_for_may_be_said(make_edge, body: Any) -> None:
    edge = await make_edge()

    assert (await edge.client.post("/tokenize", json=body)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/v1/models", "/v1/models/tiny", "/metrics", "/ui"]
)
async def test_where_there_is_get_there_is_head(make_edge, path: str) -> None:
    edge = await make_edge(ScriptedReplica())
    url = await edge.listen()

    async with httpx.AsyncClient() as client:
        head, get = await client.head(f"{url}{path}"), await client.get(f"{url}{path}")

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    operations = (await edge.client.get("/openapi.json")).json()["paths"].get(path, {})
    assert "head" not in operations
