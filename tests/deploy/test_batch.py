"""Batch files in OpenAI's format: checked whole before anything is sent, answered line by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from deploy.batch import BatchRequest, read_batch, run
from deploy.client import ClientError
from deploy.commands import app
from tests.deploy.test_flags import given_to_settings
from workers.engine.errors import InvalidRequest


def line(custom_id: str = "a", **changes: Any) -> str:
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": []},
    }
    return json.dumps({**request, **changes})


def test_a_file_of_requests_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line("a") + "\n\n" + line("b", url="/v1/embeddings") + "\n")

    assert [(one.custom_id, one.url) for one in read_batch(path)] == [
        ("a", "/v1/chat/completions"),
        ("b", "/v1/embeddings"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{", "line 1: no JSON"),
        (line() + "\n[]", "line 2: a request is an object"),
        (line(custom_id=3), "custom_id must be text"),
        (line(url="/v1/files"), "not served in batches"),
        (line(method="GET"), "not served in batches"),
        (line(body={"stream": True}), "stream has no meaning"),
        (line() + "\n" + line(), "two requests with custom_id 'a'"),
        (
            line() + "\n" + line("b", body={"prompt": "x\ud800y"}),
            r"line 2: body.prompt: holds \\ud800, one half",
        ),
        (line("\ud800"), r"line 1: custom_id: holds \\ud800"),
        (line(body={"\ud800": 1}), "line 1: "),
        (line(body={"temperature": float("nan")}), "line 1: no JSON"),
        (line(body={"temperature": float("inf")}), "line 1: no JSON"),
        (line(body={"temperature": 0.5}).replace("0.5", "1e999"), "line 1: no JSON: a number is larger"),
        ("[" * 100_000 + "]" * 100_000, r"line 1: \[0\]: is nested more than 200"),
        (line(body={"prompt": 0.5}).replace("0.5", "[" * 100_000 + "]" * 100_000), "line 1: body: is nested"),
        (
            line(body={"seed": 0.5}).replace("0.5", "9" * 5000),
            "line 1: body.seed: is a number of 5000 digits",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)

    with pytest.raises(InvalidRequest, match=says):
        read_batch(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_json_lines_say_and_nowhere_else(tmp_path: Path, end: str) -> None:
    bodies = [{"prompt": text} for text in ("a\u2028b", "a\u2029b", "a\u0085b", "a\x7fb")]
    lines = [
        json.dumps(json.loads(line(str(i), body=body)), ensure_ascii=False) for i, body in enumerate(bodies)
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())

    assert [one.body for one in read_batch(path)] == bodies


async def answers(
    tmp_path: Path, handler: Callable[[httpx.Request], httpx.Response], num_requests: int
) -> Any:
    requests = [BatchRequest(str(i), "/v1/completions", {"prompt": str(i)}) for i in range(num_requests)]
    path = tmp_path / "out.jsonl"
    transport = httpx.MockTransport(handler)
    summary = await run(requests, path, "http://shoal/v1", "sk-key", 3, transport)
    return summary, {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


async def test_every_request_has_its_answer(tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://shoal/v1/completions"
        assert request.headers["authorization"] == "Bearer sk-key"
        prompt = json.loads(request.content)["prompt"]
        status = 400 if prompt == "3" else 200
        return httpx.Response(status, json={"echo": prompt}, headers={"x-request-id": f"r{prompt}"})

    summary, found = await answers(tmp_path, handler, 10)

    assert (summary.num_answered, summary.num_failed) == (9, 1)
    assert found["7"]["response"] == {"status_code": 200, "request_id": "r7", "body": {"echo": "7"}}
    assert found["3"]["response"]["status_code"] == 400
    assert len(found) == 10


async def test_a_full_queue_is_tried_again_and_a_dead_server_is_told(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        tries[prompt] = tries.get(prompt, 0) + 1
        if prompt == "1":
            raise httpx.ConnectError("nobody there")
        return httpx.Response(429 if tries[prompt] == 1 else 200, json={})

    summary, found = await answers(tmp_path, handler, 2)

    assert tries["0"] == 2
    assert found["0"]["response"]["status_code"] == 200
    assert found["1"]["error"] == {"code": "unreachable", "message": "nobody there"}
    assert (summary.num_answered, summary.num_failed) == (1, 1)


async def test_a_page_of_a_proxy_is_an_answer_too(tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(502, text="<html>bad gateway</html>")

    summary, found = await answers(tmp_path, handler, 1)

    assert summary.num_failed == 1
    assert found["0"]["response"]["body"] == "<html>bad gateway</html>"


async def test_an_answer_that_cannot_be_written_as_json_is_written_as_text(tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        prompt = int(json.loads(request.content)["prompt"])
        return httpx.Response(200, content=[b'"\\ud800"', b"NaN", b"[" * 100_000 + b"]" * 100_000][prompt])

    summary, found = await answers(tmp_path, handler, 3)

    assert summary.num_answered == 3
    assert [found[i]["response"]["body"][:7] for i in "012"] == ['"\\ud800', "NaN", "[[[[[[["]


async def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={})

    output = tmp_path / "out"
    output.symlink_to("/dev/full")
    requests = [BatchRequest(str(i), "/v1/completions", {}) for i in range(9)]
    with pytest.raises(InvalidRequest, match=r"--output-file .* cannot be written: No space left"):
        await run(requests, output, "http://shoal", None, 3, httpx.MockTransport(handler))


async def test_what_was_in_the_file_stays_until_all_is_answered(tmp_path: Path) -> None:
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    output.write_text("of another day\n")
    while_running: list[tuple[str, int]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        while_running.append((output.read_text(), len(partial.read_text().splitlines())))
        return httpx.Response(200, json={})

    requests = [BatchRequest(str(i), "/v1/completions", {}) for i in range(3)]
    await run(requests, output, "http://shoal", None, 1, httpx.MockTransport(handler))

    assert while_running == [("of another day\n", answered) for answered in range(3)]
    assert len(output.read_text().splitlines()) == 3
    assert not partial.exists()


async def test_a_batch_that_is_broken_off_leaves_its_answers_and_the_file_of_before(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("of another day\n")

    def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["prompt"] == "2":
            raise RuntimeError("broken off")
        return httpx.Response(200, json={})

    requests = [BatchRequest(str(i), "/v1/completions", {"prompt": str(i)}) for i in range(4)]
    with pytest.raises(RuntimeError, match="broken off"):
        await run(requests, output, "http://shoal", None, 1, httpx.MockTransport(handler))

    assert output.read_text() == "of another day\n"
    left = (tmp_path / "out.partial").read_text().splitlines()
    assert [json.loads(one)["custom_id"] for one in left] == ["0", "1"]


def test_a_batch_that_nobody_would_answer_changes_no_file(tmp_path: Path) -> None:
    output, given = tmp_path / "out", tmp_path / "in"
    output.write_text("of another day\n")
    given.write_text(line())
    command = ["run-batch", "-i", str(given), "-o", str(output), "--url", "http://127.0.0.1:9"]

    result = CliRunner().invoke(app, command)

    assert isinstance(result.exception, ClientError)
    assert output.read_text() == "of another day\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


async def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError("sent")

    requests = [BatchRequest("a", "/v1/completions", {})]
    with pytest.raises(InvalidRequest, match=r"--output-file .* cannot be written: No such file"):
        await run(requests, tmp_path / "no" / "out", "http://shoal", None, 1, httpx.MockTransport(handler))


@pytest.mark.parametrize("given", ["out", "out.partial", "link"])
def test_a_batch_does_not_overwrite_its_own_requests(tmp_path: Path, given: str) -> None:
    (tmp_path / "link").symlink_to("out.partial")
    (tmp_path / given).write_text(line())
    command = ["run-batch", "-i", str(tmp_path / given), "-o", str(tmp_path / "out")]

    result = CliRunner().invoke(app, [*command, "--url", "http://127.0.0.1:9"])

    assert isinstance(result.exception, InvalidRequest)
    assert "would overwrite the input" in str(result.exception)
    assert (tmp_path / given).read_text() == line()


def test_a_batch_with_a_model_takes_the_flags_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_API_KEY", "sesame")  # for servers: nobody but the command reaches this one
    monkeypatch.setenv("SHOAL_HOST", "0.0.0.0")
    (tmp_path / "in").write_text(line())
    given = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "some/model"]

    settings = given_to_settings(
        monkeypatch, *given, "-tp", "2", "--no-enable-prefix-caching", "--device", "cpu", command="run-batch"
    )
    wrong = CliRunner().invoke(app, ["run-batch", *given, "--block-size", "17"])

    assert (settings.model, settings.replicas, settings.tensor_parallel_size) == ("some/model", 1, 2)
    assert (settings.enable_prefix_caching, settings.device) == (False, "cpu")
    assert (settings.host, settings.api_key) == ("127.0.0.1", ())
    assert isinstance(wrong.exception, InvalidRequest)
    assert str(wrong.exception).startswith("--block-size is 17: ")


def test_flags_of_an_engine_without_a_model_of_its_own_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run-batch", "-i", "in", "-o", "out", "--tensor-parallel-size", "2"])

    assert isinstance(result.exception, InvalidRequest), result.output
    assert str(result.exception).startswith("--tensor-parallel-size needs --model")
