"""A process that tries grammars, of which one can take all memory or overflow the stack of whatever compiles it.

A thread that compiles can neither be ended nor survived. Run as ``python -m router.text.grammar_process``; it is
spoken to over the socket that is its standard input.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from workers.child_module import start_module
from workers.engine.errors import InvalidRequest
from workers.framing import LENGTH_BYTES, frame
from workers.grammar import GrammarCompiler
from workers.grammar_thread import STACK_BYTES

_STACK_BYTES = STACK_BYTES // 8
"""No more than the threads of a replica's masks have, either: nested forms that pass here have room there."""


_MODULE = "router.text.grammar_process"
_OVERFLOWS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""How a process ends whose stack is too small, or whose memory is not given."""
_START_S = 5.0
"""To start, or to end."""
_WALL_TIMES = 10.0
"""A process may wait for its core so many times as long as it may compute; then it is taken for stopped."""


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
        self._link: socket.socket | None = None
        self._is_closed = False

    def check(self, grammar: str) -> None:
        """Return if the grammar compiles.

        Raises:
            TooSlow: it does not in the time given.
            InvalidRequest: it does not at all, or not in the memory given.
            RuntimeError: the process ended or stood still twice, and not because of the grammar.
        """
        asked = grammar.encode("utf-8", "surrogatepass")
        for _ in range(2):
            if self._is_closed:
                raise RuntimeError("closed while a grammar was compiled")
            answer = self._ask(asked)
            if answer is not None:
                break
            self._bury()  # it may have been ended, or stopped, long ago: ask another one
        else:
            raise RuntimeError("the process that compiles grammars has ended twice")
        if answer:
            raise InvalidRequest(answer.decode(), "grammar")

    def close(self) -> None:
        """End it at once, whatever it compiles; whoever waits for it is told so."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, grammar: bytes) -> bytes | None:
        """The answer; None if none came."""
        try:
            link = self._start() if self._link is None else self._link
            link.sendall(frame(grammar))
            return _receive(link)
        except TimeoutError:  # it says nothing for much longer than it may compute
            if self._process is not None:
                self._process.kill()
            return None
        except OSError:  # it has hung up
            return None

    def _start(self) -> socket.socket:
        link, other = socket.socketpair()
        link.settimeout(_WALL_TIMES * self._vocabulary.cpu_s + _START_S)
        self._link = link
        with other:
            self._process = start_module(_MODULE, other.fileno(), subprocess.DEVNULL)
        link.sendall(frame(msgspec.msgpack.encode(self._vocabulary)))
        return link

    def _bury(self) -> None:
        """Forget a process that does not answer.

        Raises:
            InvalidRequest: the grammar has ended it.
        """
        process, link = self._process, self._link
        self._process = self._link = None
        if link is not None:
            link.close()
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_START_S)
        process.kill()
        ended_by = -process.wait()
        if ended_by == signal.SIGPROF:
            given = f"{self._vocabulary.cpu_s:g} s of a core"
            raise TooSlow(f"is not compiled after {given}: make it simpler", "grammar")
        if ended_by in _OVERFLOWS:
            space = f"{self._vocabulary.memory_bytes >> 20} MiB"
            raise InvalidRequest(
                f"takes more than {space} to compile, or is nested too deeply: make it simpler", "grammar"
            )


def main() -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; who asks ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    answering = threading.Thread(target=_answer)
    answering.start()
    answering.join()


def _answer() -> None:
    link = socket.socket(fileno=sys.stdin.fileno())
    vocabulary = msgspec.msgpack.decode(_receive(link), type=Vocabulary)
    compiler = make_compiler(vocabulary.token_bytes, frozenset(vocabulary.special_token_ids))
    most = _address_space() + vocabulary.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with contextlib.suppress(ConnectionError):  # whoever asked has gone
        while True:
            asked = _receive(link).decode("utf-8", "surrogatepass")
            # What the signal does by default ends the process, also where no byte code runs.
            signal.setitimer(signal.ITIMER_PROF, vocabulary.cpu_s)
            refusal = _refusal(compiler, asked)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.sendall(frame(refusal.encode()))


def _refusal(compiler: GrammarCompiler, grammar: str) -> str:
    """Why a grammar is refused; empty if it is not."""
    try:
        compiler.matcher(grammar)
    except InvalidRequest as error:
        return error.message
    return ""


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


def _receive(link: socket.socket) -> bytes:
    """The next message.

    Raises:
        ConnectionError: the other side has hung up.
    """
    length = int.from_bytes(_receive_exactly(link, LENGTH_BYTES), "little")
    return _receive_exactly(link, length)


def _receive_exactly(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("hung up")
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
