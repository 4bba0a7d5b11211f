"""The brain's process: commands of the replica in, plans to the ranks, one update a step back.

``python -m workers.brain`` speaks over its standard input, a socket that ``brain_client`` made: the first
message is a ``BrainConfig``, then come commands. Its end of file says that the replica is gone, and the brain
follows. A replica that is stopped it ends itself. It sleeps while there is nothing to do.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from workers.brain_messages import (
    BrainConfig,
    Cancel,
    Command,
    Failed,
    Ping,
    Pong,
    QueueShown,
    Release,
    ShowQueue,
    SnapshotCache,
    Started,
    StepUpdate,
    Stop,
    Submit,
    TokenOutput,
    Update,
)
from workers.channel.executor import ChannelExecutor
from workers.engine.constraint import Matcher
from workers.engine.engine import Engine
from workers.engine.errors import RankLost, UserError
from workers.engine.plan import Executor
from workers.engine.request import EngineRequest, FinishReason
from workers.framing import FramedSocket
from workers.grammar_thread import Compile, GrammarThread
from workers.process_state import end_once_stopped
from workers.scripted import ScriptedExecutor

log = logging.getLogger("shoal.brain")

_ORPHAN_GRACE_S = 5.0  # for the loop to see by itself that the replica is gone, before the process is ended


class BrainExecutor(Executor, Protocol):
    """An executor that a loop can wait for beside other things."""

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that turn readable when ``ready`` may have changed its answer."""
        ...

    def ready_in_s(self) -> float | None:
        """Seconds after which to ask ``ready`` again whatever the descriptors say; None: no need to."""
        ...


class Brain:
    """The loop around one engine. Everything happens on the thread that calls ``run``."""

    def __init__(
        self,
        engine: Engine,
        executor: BrainExecutor,
        replica: FramedSocket,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarThread | None = None,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._replica = replica
        self._clock = clock
        self._grammars = grammars
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._outputs: list[TokenOutput] = []
        self._kept: list[str] = []
        """Requests that were to be released and had begun."""
        self._is_changed = False
        """True if the replica's picture is out of date though no step says so."""
        self._is_stopped = False

    def run(self) -> None:
        """Turn until told to stop or the replica is gone.

        Raises:
            RankLost: a rank is gone.
        """
        self._tell(Started(self._engine.load()))
        while True:
            self._take_commands()
            self._take_matchers()
            if self._is_stopped or not self._replica.is_open:
                return
            if self._executor.ready():
                self._outputs += self._engine.apply(self._executor.collect(), self._clock())
                self._is_changed = True
            self._launch()
            # The ranks have their next plan: now there is time to tell.
            # A step without outputs is told as well: it is progress, and shortens what is queued.
            if self._outputs or self._is_changed:
                self._tell_step()
            self._sleep()

    def _launch(self) -> None:
        now_s = self._clock()
        while (plan := self._engine.plan(now_s)) is not None:
            self._executor.launch(plan)

    def _tell_step(self) -> None:
        engine = self._engine
        self._tell(StepUpdate(self._outputs, engine.drain_cache_events(), engine.load(), self._kept))
        self._outputs, self._kept = [], []
        self._is_changed = False

    def _tell(self, update: Update) -> None:
        self._replica.send(self._encoder.encode(update))

    def _sleep(self) -> None:
        """Wait for a command, a result, or room for what is unsent."""
        if self._executor.ready():
            return
        poller = select.poll()
        poller.register(self._replica, select.POLLIN | (select.POLLOUT if self._replica.has_unsent else 0))
        for fd in self._executor.filenos():
            poller.register(fd, select.POLLIN)
        if self._grammars is not None:
            poller.register(self._grammars, select.POLLIN)
        wait_s = self._executor.ready_in_s()
        poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        self._replica.flush()

    # Commands

    def _take_commands(self) -> None:
        for payload in self._replica.receive():
            try:
                command = self._decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self._refuse(payload, error)
            else:
                self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(request):
                if request.params.grammar and self._grammars is not None:
                    self._grammars.put(request)
                else:
                    self._take_up(request)
            case Cancel(request_ids):
                for request_id in request_ids:
                    if self._grammars is None or not self._grammars.cancel(request_id):
                        self._is_changed |= self._engine.abort(request_id)
                cancelled = set(request_ids)
                self._outputs = [output for output in self._outputs if output.request_id not in cancelled]
            case Release(request_ids):
                for request_id in request_ids:
                    if self._engine.release(request_id):
                        self._outputs.append(TokenOutput(request_id, [], FinishReason.RELEASED))
                    else:
                        self._kept.append(request_id)
                self._is_changed = True
            case ShowQueue(prefix, least_wait_s, most):
                self._tell(QueueShown(prefix, self._engine.queued(prefix, least_wait_s, most)))
            case SnapshotCache():
                self._tell(self._engine.cache_snapshot())
            case Ping(sent_s):
                self._tell(Pong(sent_s, self._engine.has_work, self._engine.num_steps))
            case Stop():
                self._is_stopped = True

    def _take_matchers(self) -> None:
        for request, matcher in self._grammars.take() if self._grammars is not None else ():
            self._take_up(request, matcher)

    def _take_up(self, request: EngineRequest, matcher: Matcher | Exception | None = None) -> None:
        """Hand a request to the engine; whatever is wrong with it or with its grammar fails it alone."""
        try:
            if isinstance(matcher, Exception):
                raise matcher
            output = self._engine.add(request, self._clock(), matcher)
        except UserError as error:
            output = _failure(request.request_id, error.message, error.param, is_user_error=True)
        except Exception as error:
            log.exception("request %s could not be taken up", request.request_id)
            output = _failure(request.request_id, f"the engine failed on this request: {error}")
        if output is not None:
            self._outputs.append(output)

    def _refuse(self, payload: bytes, error: msgspec.MsgspecError) -> None:
        """Fail the request behind a message that makes no sense, if it names one."""
        try:
            request_id = msgspec.msgpack.decode(payload, type=_Envelope).request.request_id
        except msgspec.MsgspecError:
            log.exception("a command could not be read")
            return
        log.warning("request %s could not be read: %s", request_id, error)
        self._outputs.append(_failure(request_id, f"the request could not be read: {error}"))


class _RequestId(msgspec.Struct):
    request_id: str


class _Envelope(msgspec.Struct):
    """As much of a ``Submit`` as is needed to answer it."""

    request: _RequestId


def _failure(
    request_id: str, message: str, param: str | None = None, *, is_user_error: bool = False
) -> TokenOutput:
    return TokenOutput(
        request_id,
        [],
        FinishReason.ERROR,
        error=message,
        error_param=param,
        is_user_error=is_user_error,
    )


# The process


def main() -> int:
    """Serve the replica at the other end of standard input; the exit code is 0 only if it asked to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the replica decides
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    replica = FramedSocket(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    threading.Thread(target=_end_orphan, args=(replica.fileno(),), daemon=True).start()
    try:
        config = _read_config(replica)
        if config.replica_stop_s is not None:
            end_once_stopped(os.getppid(), config.replica_stop_s)
        executor = make_executor(config)
        try:
            grammars = GrammarThread(partial(_load_grammars, config)) if config.vocabulary_path else None
            # What has been imported by now lives as long as the process: keep it out of collections.
            gc.freeze()
            Brain(Engine(config.engine, config.cost), executor, replica, grammars=grammars).run()
        finally:
            executor.close()
    except RankLost as error:
        log.error("a rank is lost: %s", error)
        return _report(replica, str(error))
    except Exception as error:
        log.exception("the brain cannot go on")
        return _report(replica, f"{type(error).__name__}: {error}")
    replica.close()
    return 0


def make_executor(config: BrainConfig) -> BrainExecutor:
    """The executor that ``config`` asks for, its ranks connected.

    Raises:
        RankLost: they did not connect in time.
    """
    if config.num_ranks == 0:
        return ScriptedExecutor(config.scripted_vocab_size, config.scripted_step_s)
    assert config.step_endpoint is not None, "the client chooses an endpoint where none is given"
    executor = ChannelExecutor(config.step_endpoint, config.num_ranks)
    try:
        executor.wait_for_ranks(config.start_timeout_s)
    except RankLost:
        executor.close()
        raise
    return executor


def _load_grammars(config: BrainConfig) -> Compile:
    """Read the vocabulary; a second's work, on the grammars' own thread."""
    from workers.checkpoint.source import ModelFiles
    from workers.checkpoint.vocabulary import load_vocabulary
    from workers.grammar import GrammarCompiler
    from workers.mask_threads import spare_threads

    vocabulary = load_vocabulary(ModelFiles(Path(config.vocabulary_path), "model"))
    return GrammarCompiler(
        vocabulary.token_bytes, vocabulary.special_token_ids, config.engine.eos_token_ids, spare_threads()
    ).matcher


def _read_config(replica: FramedSocket) -> BrainConfig:
    """The first message; what has come after it is kept for the loop."""
    poller = select.poll()
    poller.register(replica, select.POLLIN)
    while replica.is_open:
        poller.poll()
        for payload in replica.receive(max_messages=1):
            return msgspec.msgpack.decode(payload, type=BrainConfig)
    raise EOFError("the replica hung up before it said what to do")


def _report(replica: FramedSocket, message: str) -> int:
    replica.send(msgspec.msgpack.encode(Failed(message)))
    replica.close()
    return 1


def _end_orphan(fd: int) -> None:
    """End the process if the replica is gone and the loop, stuck in a call perhaps, does not notice."""
    poller = select.poll()
    poller.register(fd, getattr(select, "POLLRDHUP", 0))
    poller.poll()
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
