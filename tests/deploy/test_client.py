"""The command line's own client."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.batch import BatchRequest, run
from deploy.client import Client, ClientError
from deploy.console import console
from workers.engine.errors import InvalidRequest


class Models(BaseHTTPRequestHandler):
    """Serves one model at ``/v1``."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else b'{"error": {"message": "no"}}'
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_path_of_an_endpoint_may_be_left_out(path: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        assert Client(f"http://127.0.0.1:{server.server_port}{path}").first_model() == "tiny"

        server.shutdown()


@pytest.mark.parametrize(
    "url", ["banana", "localhost:8000", "ftp://host/v1", "http://", "http://host:port", "http://[::1", ""]
)
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is no address of an endpoint: write it as http://HOST:PORT/v1"):
        Client(url)


@pytest.mark.parametrize("key", ["schlüssel", "a\nb"])
def test_a_key_that_fits_no_header_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="the API key holds characters"):
        Client("http://host", key)


class Answer(BaseHTTPRequestHandler):
    """Answers everything with ``body``; a stream of it has no end of its own."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], Client]]:
    """Clients of servers that answer as told."""
    servers = []

    def make(body: bytes) -> Client:
        server = HTTPServer(("127.0.0.1", 0), type("Told", (Answer,), {"body": body}))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Client(f"http://127.0.0.1:{server.server_port}")

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"data": 3}', b'{"models": []}'])
def test_a_server_of_another_kind_is_told_from_ours(answering, body: bytes) -> None:
    with pytest.raises(ClientError, match="does not speak OpenAI's API"):
        answering(body).first_model()


def test_what_came_before_a_stream_broke_off_is_given_and_then_the_reason(answering) -> None:
    event = b'data: {"choices": [{"text": "half"}]}\n\n'

    for body, says in (
        (event, "broke off before its end"),
        (event + b"data: {\n\n", "no JSON"),
        (event + b'data: {"error": {"message": "the replica is gone"}}\n\n', "the replica is gone"),
    ):
        pieces = answering(body).stream_completion("tiny", "x")
        assert next(pieces) == "half"
        with pytest.raises(ClientError, match=says):
            next(pieces)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x0bb", "a\x1cb"])
def test_a_stream_may_hold_any_character_of_a_text(answering, text: str) -> None:
    event = f'data: {{"choices": [{{"text": "{text}"}}]}}'.replace("\x0b", "\\u000b").replace(
        "\x1c", "\\u001c"
    )

    for end in ("\n\n", "\r\n\r\n"):
        body = f"{event}{end}data: [DONE]{end}".encode()
        assert list(answering(body).stream_completion("tiny", "x")) == [text]


def test_text_of_the_command_line_that_is_no_utf8_is_refused(answering) -> None:
    with pytest.raises(InvalidRequest, match="no UTF-8"):
        list(answering(b"").stream_completion("tiny", "x\udcff"))
    with pytest.raises(InvalidRequest, match="no address"):
        Client("http://host\udcff/v1")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SSL_CERT_FILE", "/nope", "SSL_CERT_FILE is '/nope'.*: No such file"),
        ("SSL_CERT_FILE", __file__, "SSL_CERT_FILE is .*, which holds no certificates"),
        ("HTTPS_PROXY", "banana://x", "HTTPS_PROXY"),
        ("ALL_PROXY", "http://x:y", "ALL_PROXY"),
    ],
)
async def test_what_the_environment_says_wrongly_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(InvalidRequest, match=says):
        Client("https://host")
    with pytest.raises(InvalidRequest, match=says):
        await run([BatchRequest("a", "/v1/completions", {})], tmp_path / "out", "https://host", None, 1)


def test_what_cannot_be_reached_is_told_by_what_is_wrong(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ClientError, match="start it with `shoal serve`"):
            Client(f"http://127.0.0.1:{closed.getsockname()[1]}").first_model()

    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=localhost", "-keyout", "own.key", "-out", "own.crt"]
    subprocess.run([*make, *names], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.crt", tmp_path / "own.key")
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(
            ClientError, match="not trusted here: if it is yours, name its file by SSL_CERT_FILE"
        ):
            Client(f"https://127.0.0.1:{server.server_port}").first_model()
        with pytest.raises(ClientError, match="is no endpoint"):
            Client(f"http://127.0.0.1:{server.server_port}").first_model()
        server.shutdown()


@pytest.mark.parametrize("kind", ["first model", "stream"])
def test_a_server_that_lets_in_and_says_nothing_is_told_once_and_waited_for(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    say = console.print

    def hear(text: str, **options: Any) -> None:
        say(text, **options)
        told.set()

    monkeypatch.setattr(console, "print", hear)
    body = b'{"data": [{"id": "tiny"}]}' if kind == "first model" else b"data: [DONE]\n\n"

    class Late(Answer):
        """Answers once the user was told that it has not."""

        def do_GET(self) -> None:
            if told.wait(30):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

    with HTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        client = Client(url, silence_s=0.01)
        if kind == "first model":
            assert client.first_model() == "tiny"
        else:
            assert list(client.stream_chat("tiny", [])) == []

        server.shutdown()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"Nothing has come from {url}/v1 for 0.01 s: still waiting, Ctrl-C ends it\n"
