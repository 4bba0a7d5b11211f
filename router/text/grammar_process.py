"""A process that tries grammars, of which one can take all memory or overflow the stack of whatever compiles it.

A thread that compiles can neither be ended nor survived. Run as ``python -m router.text.grammar_process``; it reads and
writes frames of msgpack on its standard streams.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

import msgspec

from workers.engine.errors import InvalidRequest
from workers.framing import LENGTH_BYTES, frame
from workers.grammar import GrammarCompiler
from workers.grammar_thread import STACK_BYTES

_STACK_BYTES = STACK_BYTES // 8
"""No more than the threads of a replica's masks have, either: nested forms that pass here have room there."""


class Vocabulary(msgspec.Struct):
    """What grammars are compiled for, and what compiling may take."""

    token_bytes: Sequence[bytes]
    special_token_ids: list[int]
    cpu_s: float = 3.0
    """Of a core."""
    memory_bytes: int = 512 << 20


class TooSlow(InvalidRequest):
    """A grammar is not compiled in the time that it was given."""


class GrammarProcess:
    """Started at the first grammar, and again after one that took too much. For one thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> None:
        """Return if the grammar compiles.

        Raises:
            TooSlow: it does not in the time given.
            InvalidRequest: it does not at all, or not in the memory given.
        """
        process = self._start() if self._process is None else self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, grammar.encode("utf-8", "surrogatepass"))
            answer = _read(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise self._buried(process)
        if answer:
            raise InvalidRequest(answer.decode(), "grammar")

    def close(self) -> None:
        """End it at once, whatever it compiles; whoever waits for it is told that it died."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        _write(self._process.stdin, msgspec.msgpack.encode(self._vocabulary))
        return self._process

    def _buried(self, process: subprocess.Popen[bytes]) -> InvalidRequest:
        """What a grammar did to the process."""
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        self._process = None
        if process.wait() == -signal.SIGPROF:
            given = f"{self._vocabulary.cpu_s:g} s of a core"
            return TooSlow(f"is not compiled after {given}: make it simpler", "grammar")
        space = (
            f"takes more than {self._vocabulary.memory_bytes >> 20} MiB to compile, or is nested too deeply"
        )
        return InvalidRequest(f"{space}: make it simpler", "grammar")


def main() -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; who asks ends this one
    threading.stack_size(_STACK_BYTES)
    answering = threading.Thread(target=_answer)
    answering.start()
    answering.join()


def _answer() -> None:
    wanted = _read(sys.stdin.buffer)
    assert wanted is not None, "a vocabulary comes first"
    vocabulary = msgspec.msgpack.decode(wanted, type=Vocabulary)
    compiler = make_compiler(vocabulary.token_bytes, frozenset(vocabulary.special_token_ids))
    most = _address_space() + vocabulary.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while (asked := _read(sys.stdin.buffer)) is not None:
        # What the signal does by default ends the process, also where no byte code runs.
        signal.setitimer(signal.ITIMER_PROF, vocabulary.cpu_s)
        try:
            compiler.matcher(asked.decode("utf-8", "surrogatepass"))
            refusal = ""
        except InvalidRequest as error:
            refusal = error.message
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, refusal.encode())


def make_compiler(token_bytes: Sequence[bytes], special_token_ids: frozenset[int]) -> GrammarCompiler:
    """A compiler that only checks: which of the special tokens ends an output does not matter to it."""
    return GrammarCompiler(token_bytes, special_token_ids, sorted(special_token_ids)[:1] or [0])


def _address_space() -> int:
    """Bytes of it that this process has, on Linux; elsewhere the limit is as good without them."""
    try:
        with open("/proc/self/statm") as sizes:
            return int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(frame(message))
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    message = stream.read(int.from_bytes(length, "little"))
    return message if len(message) == int.from_bytes(length, "little") else None


if __name__ == "__main__":
    main()
