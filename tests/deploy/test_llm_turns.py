"""One `LLM` whose calls are interrupted, made by several threads at once, or cut off by its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from workers.engine.engine import Engine
from workers.engine.errors import RankLost, UserError
from workers.model.rank import Rank

SHAPE = Path(__file__).parents[2] / "deploy" / "bench" / "shapes" / "tiny"
PROMPTS = [[7] * 20, list(range(100, 150)), [3, 5, 8], list(range(100, 140))]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, detokenize=False)


def make_llm(**fields: Any) -> LLM:
    options = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "cpu_threads": 1}
    return LLM(str(SHAPE), **{**options, "max_num_seqs": 8, "max_model_len": 128, **fields})


@pytest.fixture
def llm() -> Iterator[LLM]:
    made = make_llm()
    yield made
    made.close()


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(one.finished for one in outputs)
    return [one.outputs[0].token_ids for one in outputs]


def signalled(method: Callable[..., Any], *, call: int, times: int = 1, number: int = signal.SIGINT) -> Any:
    """``method``, whose ``call``-th call ends with signals to this process."""
    calls = iter(range(call + 1))

    def run(*args: Any, **fields: Any) -> Any:
        result = method(*args, **fields)
        if next(calls, None) == call:
            for _ in range(times):
                signal.raise_signal(number)
        return result

    return run


MOMENTS = [(Rank, "launch"), (Rank, "_run"), (Engine, "plan"), (Engine, "apply"), (Engine, "add")]
"""Whose state is half changed when they have returned and their callers have not gone on."""


@pytest.mark.parametrize("call", [0, 2, 3])
@pytest.mark.parametrize(("owner", "name"), MOMENTS, ids=[name for _, name in MOMENTS])
def test_an_interrupt_ends_a_call_between_steps_and_leaves_the_llm_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    before = tokens(llm)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled(getattr(owner, name), call=call))
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)

    assert llm.load.num_running == llm.load.num_waiting == 0
    assert tokens(llm) == before


@pytest.mark.parametrize(("owner", "name"), MOMENTS, ids=[name for _, name in MOMENTS])
def test_who_interrupts_twice_does_not_wait_and_is_told_that_the_llm_is_of_no_use(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled(getattr(owner, name), call=1, times=2))
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)

    for _ in range(2):
        with pytest.raises(RankLost, match="KeyboardInterrupt cut a step off: make another LLM"):
            tokens(llm)


def test_what_another_signals_handler_raises_leaves_no_half_step_unnoticed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise TimeoutError("late")

    kept = signal.signal(signal.SIGUSR1, late)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Rank, "_run", signalled(Rank._run, call=1, number=signal.SIGUSR1))
            with pytest.raises(TimeoutError, match="late"):
                tokens(llm)
    finally:
        signal.signal(signal.SIGUSR1, kept)

    with pytest.raises(RankLost, match="TimeoutError cut a step off"):
        tokens(llm)


@pytest.mark.parametrize("size", [1, 2])
def test_threads_take_turns(size: int) -> None:
    llm = make_llm(tensor_parallel_size=size)
    lone = tokens(llm)
    start = threading.Barrier(4)
    found: dict[int, list[list[list[int]]]] = {number: [] for number in range(4)}

    def call(number: int) -> None:
        start.wait()
        for _ in range(3):
            found[number].append(tokens(llm, PROMPTS[number:] + PROMPTS[:number]))

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    llm.close()
    assert found == {number: [lone[number:] + lone[:number]] * 3 for number in found}


def test_a_call_from_a_handler_amid_another_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tokens(llm)
    refused: list[str] = []

    def call(*_: object) -> None:
        with pytest.raises(UserError, match="at work in the same thread") as error:
            tokens(llm)
        refused.append(error.value.message)

    kept = signal.signal(signal.SIGUSR1, call)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Rank, "_run", signalled(Rank._run, call=1, number=signal.SIGUSR1))
            assert tokens(llm) == before
    finally:
        signal.signal(signal.SIGUSR1, kept)

    assert len(refused) == 1


def test_an_end_amid_a_call_ends_the_call_first(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    is_amid, closing = threading.Event(), threading.Thread(target=llm.close, daemon=True)
    run, errors = Rank._run, []

    def waiting(*args: Any) -> Any:
        is_amid.set()
        while not llm._loop._is_closed:
            pass  # until the other thread has asked
        return run(*args)

    def call() -> None:
        try:
            tokens(llm)
        except UserError as error:
            errors.append(error.message)

    monkeypatch.setattr(Rank, "_run", waiting)
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    assert is_amid.wait(60)
    closing.start()
    closing.join(60)
    calling.join(60)

    assert errors == ["this LLM was closed amid a call"]
    with pytest.raises(UserError, match="make another"):
        tokens(llm)


def test_an_end_by_a_handler_takes_place_when_the_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    closed: list[bool] = []
    close = Rank.close
    monkeypatch.setattr(Rank, "close", lambda rank: (closed.append(True), close(rank)))
    monkeypatch.setattr(Rank, "_run", signalled(Rank._run, call=1, number=signal.SIGUSR1))
    kept = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    try:
        with pytest.raises(UserError, match="closed amid a call"):
            tokens(llm)
    finally:
        signal.signal(signal.SIGUSR1, kept)

    assert closed == [True]


def test_an_end_by_a_handler_amid_an_end_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    closed: list[bool] = []

    def close(rank: Rank) -> None:
        closed.append(True)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Rank, "close", close)
    kept = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    try:
        llm.close()
    finally:
        signal.signal(signal.SIGUSR1, kept)

    assert closed == [True]
