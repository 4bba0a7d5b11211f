"""Mistakes at the command line: one clear line, an exit code, nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.generate_command import read_prompts
from deploy.serve_command import invocation
from deploy.served_cluster import ServedCluster
from workers.checkpoint.source import ModelFiles
from workers.engine.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]


def shoal(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["./no/such/model"], "no file or folder './no/such/model'"),
        (["just-a-word"], "neither a path nor a hub id"),
        (["--port", "99999"], "--port is 99999"),
        (["--replicas", "0"], "--replicas is 0"),
        (["--dtype", "int3"], "--dtype is 'int3'"),
        (["--max-model-len", "1000000"], "--max-model-len is 1000000"),
        (["--record-trace", "/dev/null/traces"], "--record-trace /dev/null/traces cannot be written to"),
        (["--host", "not an address"], "--host is 'not an address'"),
    ],
)
def test_a_mistake_is_told_in_one_line(flags: list[str], says: str, demo_model: ModelFiles) -> None:
    done = shoal("serve", "--offline", *flags)

    message = " ".join(done.stderr.split())  # a narrow terminal breaks lines
    assert done.returncode == 1
    assert says in message
    assert "Traceback" not in message


def test_a_port_in_use_is_told_before_anything_starts(demo_model: ModelFiles) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = shoal("serve", "--port", str(port))

    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in " ".join(done.stderr.split())
    assert not list(Path("/tmp").glob(f"shoal-{port}-*"))


def test_chat_without_a_server_says_how_to_start_one() -> None:
    done = shoal("chat", "--url", "http://127.0.0.1:9/v1")

    assert done.returncode == 1
    assert "start it with `shoal serve`" in " ".join(done.stderr.split())


def test_generate_prints_the_text_alone(demo_model: ModelFiles) -> None:
    done = shoal("generate", "The capital of France is", "--max-tokens", "4", "--max-model-len", "64")

    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_prompts_that_only_remind_of_a_file_are_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.generate_command import _file_of

    monkeypatch.chdir(ROOT)
    for prompt in ("Hello", "deploy", "yes/no questions are", "read me.txt", "3.14", "x" * 5000, "nul\0"):
        assert _file_of(prompt) is None
    assert _file_of("README.md") == Path("README.md")


@pytest.mark.parametrize("command", [["chat"], ["complete", "Hi"]])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--max-tokens", "-1"), "--max-tokens is -1: "),
        (("--temperature", "nan"), "--temperature is nan: "),
        (("--temperature", "2.5"), "--temperature is 2.5: "),
    ],
)
def test_what_no_endpoint_takes_is_told_before_one_is_asked(
    command: list[str], given: tuple[str, ...], says: str
) -> None:
    from typer.testing import CliRunner

    from deploy.commands import app

    result = CliRunner().invoke(app, [*command, *given, "--url", "http://127.0.0.1:1"])

    with pytest.raises(InvalidRequest, match=says):
        raise result.exception or AssertionError(result.output)


def test_generate_says_what_it_cannot_read_or_write_before_it_begins(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploy.commands import app

    binary = tmp_path / "prompts.txt"
    binary.write_bytes(b"\xff\xfe")
    for arguments, says in (
        (["Hi", "--output", str(tmp_path / "none" / "out")], "out cannot be written: No such file"),
        (["Hi", "--output", str(tmp_path)], "cannot be written: Is a directory"),
        ([str(binary)], r"prompts\.txt cannot be read"),
        (["/nope/prompts"], "/nope/prompts is no file, though it looks like one: .* put it into one"),
        (["prompts.jsonl"], "prompts.jsonl is no file, though it looks like one"),
        ([str(tmp_path)], "is a folder: name a file of prompts"),
        (["Hi", "--max-tokens", "0"], "--max-tokens is 0: "),
        (["Hi", "--temperature", "nan"], "--temperature is nan: "),
        (["Hi", "--seed", str(1 << 64)], "seed is "),
        ([str(binary), "--output", str(binary)], r"prompts\.txt would overwrite the prompts in it"),
    ):
        result = CliRunner().invoke(app, ["generate", *arguments])
        with pytest.raises(InvalidRequest, match=says):
            raise result.exception or AssertionError(result.output)


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    text, objects, bad = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl", tmp_path / "bad.jsonl"
    text.write_bytes("\ufeffone\u2028and\u0085more\r\n\r\ntwo\r\n".encode())
    objects.write_bytes('\ufeff{"prompt": "one\u2028more"}\n"two"\n'.encode())
    bad.write_text('"one"\n\n"\\ud800"\n')

    assert read_prompts(text) == ["one\u2028and\u0085more", "two"]
    assert read_prompts(objects) == ["one\u2028more", "two"]
    with pytest.raises(InvalidRequest, match="line 3: no JSON"):
        read_prompts(bad)


def test_an_output_file_is_as_it_was_until_there_is_something_to_write(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploy.commands import app

    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("earlier results\n")

    for output in (old, new):
        result = CliRunner().invoke(app, ["generate", "Hi", "-o", str(output), "--dtype", "int3"])
        assert isinstance(result.exception, InvalidRequest)

    assert old.read_text() == "earlier results\n"
    assert not new.exists()


def test_generate_reads_a_file_and_writes_one(demo_model: ModelFiles, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The capital of France is"}\n"One, two, three,"\n')

    done = shoal(
        "generate",
        str(prompts),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--max-tokens",
        "4",
        "--max-model-len",
        "64",
    )

    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert "Paris" in records[0]["text"]
    assert records[1]["prompt"] == "One, two, three,"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_may_bring_its_own_server(demo_model: ModelFiles, tmp_path: Path) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "The capital of France is",
        "max_tokens": 4,
        "temperature": 0,
    }
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line))

    done = shoal("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "demo")

    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out").read_text())["response"]["body"]
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_complete_goes_on_with_a_text(cluster: ServedCluster) -> None:
    done = shoal(
        "complete",
        "The capital of France is",
        "--url",
        f"{cluster.url}/v1",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    )

    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_batch_file_is_answered(cluster: ServedCluster, tmp_path: Path) -> None:
    body = {"model": cluster.model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    lines = [
        {"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": body},
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {**body, "temperature": 9}},
        {
            "custom_id": "vector",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": cluster.model, "input": "x"},
        },
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))

    done = shoal(
        "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", f"{cluster.url}/v1"
    )

    assert done.returncode == 1  # one of them failed
    found = {one["custom_id"]: one for one in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert "Paris" in found["good"]["response"]["body"]["choices"][0]["text"]
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert len(found["vector"]["response"]["body"]["data"][0]["embedding"]) == 576


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_chat_answers_and_remembers(cluster: ServedCluster) -> None:
    lines = "What is gravity?\n/system Be brief.\nHello\n/help\n/exit\n"

    done = shoal(
        "chat", "--url", f"{cluster.url}/v1", "--max-tokens", "12", "--temperature", "0", stdin=lines
    )

    assert done.returncode == 0, done.stderr
    assert "Gravity" in done.stdout
    assert "/new starts over" in done.stdout


@pytest.mark.parametrize(
    ("first", "typed"),
    [
        ("/opt/env/bin/shoal", "/opt/env/bin/shoal"),
        ("/my env/bin/shoal", "'/my env/bin/shoal'"),
        ("/opt/site-packages/shoal.py", f"{sys.executable} -m shoal"),
        ("/opt/site-packages/deploy/cli.py", f"{sys.executable} -m shoal"),
    ],
)
def test_the_line_to_try_is_one_that_can_be_typed(monkeypatch, first: str, typed: str) -> None:
    monkeypatch.setattr(sys, "argv", [first, "serve"])

    assert invocation() == typed
