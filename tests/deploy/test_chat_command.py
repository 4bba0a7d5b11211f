"""``shoal chat`` and ``shoal complete`` as they are typed and piped, before a server that tells without end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
CTRL_C, CTRL_D = b"\x03", b"\x04"

pytestmark = pytest.mark.timeout(60)


class Teller(BaseHTTPRequestHandler):
    """Says ``word`` again and again, or once if that is what it was told."""

    has_left = threading.Event()
    told: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "tiny"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.told.append(body)
        said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        choice = {"delta": {"content": "word "}} if "messages" in body else {"text": "word "}
        event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(event)
            while said != "once":
                self.wfile.write(event)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.has_left.set()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def teller() -> Iterator[tuple[str, type[Teller]]]:
    """Its URL, and what it has heard."""
    kind = type("OneTeller", (Teller,), {"has_left": threading.Event(), "told": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, command: Sequence[str] = ("-m", "shoal")) -> None:
        self._side, other = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, *command, *arguments], cwd=ROOT, stdin=other, stdout=other, stderr=other,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(other)
        self._seen = b""

    def until(self, text: bytes) -> None:
        """Read until ``text`` has come since the last call."""
        while text not in self._seen:
            self._seen += os.read(self._side, 65536)
        self._seen = self._seen.partition(text)[2]

    def type(self, keys: bytes) -> None:
        """As fingers do."""
        os.write(self._side, keys)

    def end(self) -> int:
        """The exit code, once all that it still says is read."""
        try:
            while os.read(self._side, 65536):
                pass
        except OSError:  # the other side is closed
            pass
        os.close(self._side)
        return self._process.wait(20)


def _take_terminal() -> None:
    """Make standard input the terminal that sends signals to this process, and hear them.

    What is started in a script's background inherits that Ctrl-C is ignored.
    """
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_ends_an_answer_and_then_the_conversation(teller: tuple[str, type[Teller]]) -> None:
    url, heard = teller
    terminal = Terminal("chat", "--url", url)
    terminal.until(b"you")

    terminal.type(b"go on\n")
    terminal.until(b"word word")
    terminal.type(CTRL_C)
    terminal.until(b"stopped")

    assert heard.has_left.wait(20)
    terminal.until(b"you")
    terminal.type(b"once\n")
    terminal.until(b"you")
    assert [one["role"] for one in heard.told[1]["messages"]] == ["user", "assistant", "user"]
    terminal.type(CTRL_C)
    assert terminal.end() == 0


_HEARD_BY_ANOTHER_THREAD = """
import os, signal, sys, threading
from rich.console import Console
from deploy.console import read_line

def has_blocked():
    return open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] == "S"

def interrupt():
    while not all(has_blocked() for _ in range(50)):
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt).start()
print(read_line(Console(), "go"))
"""


def test_ctrl_c_that_does_not_break_off_the_read_is_heard() -> None:
    terminal = Terminal(command=["-c", _HEARD_BY_ANOTHER_THREAD])

    terminal.until(b"go")
    terminal.until(b"None")

    assert terminal.end() == 0


def test_lines_typed_ahead_are_each_read(teller: tuple[str, type[Teller]]) -> None:
    url, heard = teller
    terminal = Terminal("complete", "--url", url)

    terminal.type(b"once\nonce\n\nonce\n")
    for _ in range(3):
        terminal.until(b"word")
    terminal.type(CTRL_D)

    assert terminal.end() == 0
    assert [body["prompt"] for body in heard.told] == ["once"] * 3


def test_ctrl_c_ends_a_completion_without_a_traceback(teller: tuple[str, type[Teller]]) -> None:
    url, heard = teller
    terminal = Terminal("complete", "go on", "--url", url)
    terminal.until(b"word word")

    terminal.type(CTRL_C)

    assert terminal.end() == 130
    assert heard.has_left.wait(20)


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_of_a_pipe_that_are_no_text_are_told_in_one_line(
    teller: tuple[str, type[Teller]], command: str, locale: str
) -> None:
    url, heard = teller

    done = subprocess.run(
        [sys.executable, "-m", "shoal", command, "--url", url], cwd=ROOT, input=b"\xff\xfe\n",
        env={**os.environ, "LC_ALL": locale}, capture_output=True, check=False, timeout=50,
    )  # fmt: skip

    assert (done.returncode, heard.told) == (1, [])
    assert b"standard input is not UTF-8" in b" ".join(done.stderr.split())
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "answer"), [("chat", "word \n\nword \n\n"), ("complete", "word \nword \n")]
)
def test_lines_of_a_pipe_are_answered_and_nothing_else_is_said(
    teller: tuple[str, type[Teller]], command: str, answer: str
) -> None:
    url, _ = teller

    done = subprocess.run(
        [sys.executable, "-m", "shoal", command, "--url", url], cwd=ROOT, input="once\nonce\n", text=True,
        capture_output=True, check=False, timeout=50,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, answer, "")
