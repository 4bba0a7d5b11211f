"""The brain's loop, on a thread of the test, between a replica played by the test and a scripted executor."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from workers.brain import Brain
from workers.brain_messages import (
    CacheSnapshot,
    Cancel,
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
from workers.engine.block_hash import hash_blocks
from workers.engine.config import EngineConfig
from workers.engine.constraint import Matcher
from workers.engine.engine import Engine
from workers.engine.errors import InvalidRequest
from workers.engine.plan import StepPlan, StepResult
from workers.engine.request import ChoiceParams, EngineRequest, FinishReason
from workers.framing import FramedSocket
from workers.grammar_thread import GrammarThread
from workers.scripted import ScriptedExecutor, scripted_token


class GatedExecutor:
    """A scripted executor whose results come when the test opens the gate."""

    def __init__(self) -> None:
        self._scripted = ScriptedExecutor()
        self._gate, self._opener = socket.socketpair()
        self._num_open = 0
        self.launched = threading.Semaphore(0)

    def open(self, num_steps: int = 1) -> None:
        self._opener.send(b"x" * num_steps)

    def launch(self, plan: StepPlan) -> None:
        self._scripted.launch(plan)
        self.launched.release()

    def collect(self) -> StepResult:
        self._num_open -= 1
        return self._scripted.collect()

    def ready(self) -> bool:
        if not self._num_open and select.select([self._gate], [], [], 0)[0]:
            self._num_open = len(self._gate.recv(100))
        return self._num_open > 0 and self._scripted.ready()

    def ready_in_s(self) -> float | None:
        return None

    def filenos(self) -> tuple[int, ...]:
        return (self._gate.fileno(),)

    def close(self) -> None:
        self._gate.close()
        self._opener.close()


@dataclass
class Replica:
    """What the test says to the brain and hears of it."""

    socket: FramedSocket
    thread: threading.Thread
    executor: Any
    heard: list[Update] = field(default_factory=list)
    grammars: GrammarThread | None = None

    def say(self, *commands: Any) -> None:
        for command in commands:
            self.socket.send(msgspec.msgpack.encode(command))

    def hear(self, until: Callable[[Update], bool]) -> Update:
        """The first update, heard from now on, for which ``until`` holds."""
        while True:
            while self.heard:
                if until(update := self.heard.pop(0)):
                    return update
            assert select.select([self.socket], [], [], 10)[0], "the brain says nothing"
            self.heard += [msgspec.msgpack.decode(p, type=Update) for p in self.socket.receive()]
            assert self.heard or self.socket.is_open, "the brain has hung up"

    def hear_step(self) -> StepUpdate:
        update = self.hear(lambda update: isinstance(update, StepUpdate))
        assert isinstance(update, StepUpdate)
        return update

    def outputs_of(self, request_id: str) -> list[TokenOutput]:
        """All outputs of a request until its end."""
        outputs: list[TokenOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            outputs += [output for output in self.hear_step().outputs if output.request_id == request_id]
        return outputs


@pytest.fixture
def make_replica() -> Iterator[Callable[..., Replica]]:
    """A brain that has started, and the replica's end of it."""
    replicas: list[Replica] = []

    def make(executor: Any = None, grammars: GrammarThread | None = None, **fields: Any) -> Replica:
        defaults = {"max_model_len": 256, "num_blocks": 64, "vocab_size": 32000}
        ours, theirs = socket.socketpair()
        executor = executor or ScriptedExecutor()
        engine = Engine(EngineConfig(**{**defaults, **fields}))
        brain = Brain(engine, executor, FramedSocket(theirs), grammars=grammars)
        thread = threading.Thread(target=brain.run)
        thread.start()
        replica = Replica(FramedSocket(ours), thread, executor, grammars=grammars)
        replicas.append(replica)
        assert isinstance(replica.hear(lambda _: True), Started)
        return replica

    yield make
    for replica in replicas:
        replica.socket.close()
        replica.thread.join(10)
        assert not replica.thread.is_alive()
        if replica.grammars is not None:
            replica.grammars.close()


def make_request(
    request_id: str = "r", prompt_len: int = 4, *, max_tokens: int = 3, **fields: Any
) -> EngineRequest:
    params = ChoiceParams(max_tokens=max_tokens, seed=fields.pop("seed", 1))
    return EngineRequest(request_id, list(range(prompt_len)), params, **fields)


def test_a_request_is_answered_with_one_update_a_step(make_replica) -> None:
    replica = make_replica()

    replica.say(Submit(make_request()))
    outputs = replica.outputs_of("r")

    assert [output.token_ids for output in outputs] == [[scripted_token(1, 0, at, 32000)] for at in (4, 5, 6)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_updates_carry_cache_events_and_load(make_replica) -> None:
    replica = make_replica()

    replica.say(Submit(make_request(prompt_len=32, max_tokens=1)))
    update = replica.hear_step()

    assert update.cache is not None
    assert update.cache.stored == hash_blocks(list(range(32)), 16, b"shoal")
    assert (update.load.num_steps, update.load.num_prompt_tokens) == (1, 32)


def test_a_request_that_cannot_be_served_fails_alone_with_its_field(make_replica) -> None:
    replica = make_replica()

    replica.say(Submit(make_request("bad", prompt_len=300)), Submit(make_request("good", seed=2)))
    first = replica.hear_step()

    bad = next(output for output in first.outputs if output.request_id == "bad")
    assert bad.finish_reason is FinishReason.ERROR
    assert (bad.is_user_error, bad.error_param) == (True, "prompt")
    assert "300" in str(bad.error)
    assert "256" in str(bad.error)
    replica.heard.insert(0, first)
    assert replica.outputs_of("good")[-1].finish_reason is FinishReason.LENGTH


def test_an_unexpected_failure_over_one_request_fails_it_alone(
    make_replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine.add

    def stumble(self: Engine, request: EngineRequest, now_s: float, matcher: object) -> TokenOutput | None:
        if request.request_id == "bad":
            raise ZeroDivisionError("a bug")
        return add(self, request, now_s, matcher)

    monkeypatch.setattr(Engine, "add", stumble)
    replica = make_replica()

    replica.say(Submit(make_request("bad")))
    [output] = replica.outputs_of("bad")
    replica.say(Submit(make_request("good")))

    assert output.error == "the engine failed on this request: a bug"
    assert not output.is_user_error
    assert replica.outputs_of("good")


class AnyToken:
    """A grammar that is complete after two tokens."""

    def __init__(self) -> None:
        self.num_taken = 0

    @property
    def is_complete(self) -> bool:
        return self.num_taken == 2

    def prepare(self, others: Sequence[Matcher]) -> None:
        pass

    def mask(self) -> bytes:
        return b"\xff" * 4000

    def accept(self, token_id: int) -> None:
        self.num_taken += 1


def grammar_request(request_id: str, grammar: str) -> EngineRequest:
    return EngineRequest(request_id, [1, 2], ChoiceParams(max_tokens=9, grammar=grammar))


def test_steps_go_on_while_a_grammar_is_compiled(make_replica) -> None:
    go_on = threading.Event()

    def compile_slowly(grammar: str) -> AnyToken:
        assert go_on.wait(10)
        return AnyToken()

    grammars = GrammarThread(lambda: compile_slowly)
    replica = make_replica(grammars=grammars)

    replica.say(Submit(grammar_request("slow", "g")), Submit(make_request("quick")))
    replica.outputs_of("quick")
    go_on.set()
    outputs = replica.outputs_of("slow")

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert sum(len(output.token_ids) for output in outputs) == 2


def test_a_bad_grammar_fails_its_request_alone(make_replica) -> None:
    def compile_(grammar: str) -> AnyToken:
        if grammar == "bad":
            raise InvalidRequest("unknown name: foo", "grammar")
        return AnyToken()

    grammars = GrammarThread(lambda: compile_)
    replica = make_replica(grammars=grammars)

    replica.say(Submit(grammar_request("bad", "bad")))
    [output] = replica.outputs_of("bad")
    replica.say(Submit(grammar_request("good", "good")))

    assert (output.error, output.error_param, output.is_user_error) == ("unknown name: foo", "grammar", True)
    assert replica.outputs_of("good")[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("moment", ["load", "compile"])
def test_a_panic_of_what_compiles_fails_requests_and_not_the_thread(make_replica, moment: str) -> None:
    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    def compile_(grammar: str) -> AnyToken:
        raise PanicException("unwrap")

    def load() -> Callable[[str], AnyToken]:
        if moment == "load":
            raise PanicException("unwrap")
        return compile_

    replica = make_replica(grammars=GrammarThread(load))

    for request_id in ("first", "second"):
        replica.say(Submit(grammar_request(request_id, "g")))
        [output] = replica.outputs_of(request_id)
        assert "PanicException: unwrap" in str(output.error)


def test_a_request_cancelled_while_its_grammar_is_compiled_is_not_heard_of(make_replica) -> None:
    go_on = threading.Event()

    def compile_slowly(grammar: str) -> AnyToken:
        assert go_on.wait(10)
        return AnyToken()

    grammars = GrammarThread(lambda: compile_slowly)
    replica = make_replica(grammars=grammars)

    replica.say(Submit(grammar_request("gone", "g")), Cancel(["gone"]), Ping(0.0))
    replica.hear(lambda update: isinstance(update, Pong))
    go_on.set()
    replica.say(Submit(grammar_request("next", "g")))

    assert all(output.request_id == "next" for output in replica.outputs_of("next"))


def test_without_a_vocabulary_grammars_are_refused(make_replica) -> None:
    replica = make_replica()

    replica.say(Submit(grammar_request("r", "g")))

    [output] = replica.outputs_of("r")
    assert "no vocabulary" in str(output.error)


def test_a_submit_that_cannot_be_read_fails_the_request_it_names(make_replica) -> None:
    replica = make_replica()
    message = msgspec.msgpack.encode({"type": "submit", "request": {"request_id": "odd", "params": "none"}})

    replica.socket.send(b"\xc1 not msgpack")
    replica.socket.send(message)

    [output] = replica.outputs_of("odd")
    assert output.finish_reason is FinishReason.ERROR
    assert "could not be read" in str(output.error)


def test_a_cancelled_request_is_not_heard_of_again_and_its_blocks_come_back(make_replica) -> None:
    replica = make_replica(GatedExecutor(), run_ahead=1)
    replica.say(Submit(make_request("gone", max_tokens=100)))
    replica.executor.launched.acquire(timeout=10)
    replica.executor.launched.acquire(timeout=10)

    replica.say(Cancel(["gone", "never was"]), Ping(1.0))
    replica.hear(lambda update: isinstance(update, Pong))
    replica.executor.open(2)
    replica.say(Submit(make_request("stays", max_tokens=1)))
    replica.executor.open()
    outputs = replica.outputs_of("stays")

    assert len(outputs) == 1
    replica.say(Ping(2.0))
    updates: list[Update] = []
    replica.hear(lambda update: updates.append(update) is None and isinstance(update, Pong))
    steps = [update for update in updates if isinstance(update, StepUpdate)]
    assert all(output.request_id != "gone" for step in steps for output in step.outputs)


def test_cancelling_what_waits_is_told_without_a_step(make_replica) -> None:
    replica = make_replica(GatedExecutor(), max_num_seqs=1, run_ahead=0)
    replica.say(Submit(make_request("runs", max_tokens=1)), Submit(make_request("waits")))
    replica.executor.launched.acquire(timeout=10)

    replica.say(Cancel(["waits"]))
    replica.executor.open()

    assert replica.outputs_of("runs")
    replica.say(Ping(0.0))
    pong = replica.hear(lambda update: isinstance(update, Pong))
    assert pong == Pong(0.0, has_work=False, num_steps=1)


def test_what_is_asked_back_comes_if_it_has_not_begun_and_is_named_if_it_has(make_replica) -> None:
    replica = make_replica(GatedExecutor(), max_num_seqs=1, run_ahead=0)
    replica.say(Submit(make_request("1/runs", max_tokens=1)), Submit(make_request("1/waits")))
    replica.executor.launched.acquire(timeout=10)

    replica.say(ShowQueue("1/", 0.0, 8))
    shown = replica.hear(lambda update: isinstance(update, QueueShown))
    assert isinstance(shown, QueueShown)
    assert [one.request_id for one in shown.queued] == ["1/waits"]

    replica.say(Release(["1/runs", "1/waits"]))
    step = replica.hear_step()

    assert step.kept == ["1/runs"]
    assert step.outputs == [TokenOutput("1/waits", [], FinishReason.RELEASED)]
    replica.executor.open()
    assert replica.outputs_of("1/runs")[-1].finish_reason is FinishReason.LENGTH


def test_a_ping_is_answered_while_a_step_runs(make_replica) -> None:
    replica = make_replica(GatedExecutor())
    replica.say(Submit(make_request()))
    replica.executor.launched.acquire(timeout=10)

    replica.say(Ping(12.5))

    pong = replica.hear(lambda update: isinstance(update, Pong))
    assert pong == Pong(12.5, has_work=True, num_steps=0)
    replica.executor.open(3)
    assert replica.outputs_of("r")


def test_a_snapshot_fits_the_updates_around_it(make_replica) -> None:
    replica = make_replica()
    replica.say(Submit(make_request(prompt_len=32, max_tokens=1)))
    events = replica.hear_step().cache

    replica.say(SnapshotCache())

    snapshot = replica.hear(lambda update: isinstance(update, CacheSnapshot))
    assert isinstance(snapshot, CacheSnapshot)
    assert events is not None
    assert sorted(snapshot.hashes) == sorted(events.stored)
    assert snapshot.next_sequence == 2


def test_the_loop_ends_on_stop(make_replica) -> None:
    replica = make_replica()

    replica.say(Stop())

    replica.thread.join(10)
    assert not replica.thread.is_alive()


def test_the_loop_ends_when_the_replica_is_gone_though_work_remains(make_replica) -> None:
    replica = make_replica(GatedExecutor())
    replica.say(Submit(make_request(max_tokens=100)))
    replica.executor.launched.acquire(timeout=10)

    replica.socket.close()

    replica.thread.join(10)
    assert not replica.thread.is_alive()


def test_a_replica_that_does_not_read_stops_no_step(make_replica) -> None:
    replica = make_replica(num_blocks=4096, max_model_len=16384)

    replica.say(*(Submit(make_request(f"r{i}", max_tokens=200)) for i in range(60)))
    replica.say(Submit(make_request("last", max_tokens=8000)))  # far more than the socket holds

    assert len(replica.outputs_of("last")) == 8000
