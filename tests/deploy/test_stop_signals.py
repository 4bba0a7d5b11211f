"""Signals to stop become exceptions, as often as it takes and no more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from deploy import stop_signals
from deploy.stop_signals import Interrupted, StopSignals, became_of_a_signal


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_raised_and_told_as_shells_do(signals: StopSignals, number: int, code: int) -> None:
    assert signals.exit_code == 0

    with pytest.raises(Interrupted):
        os.kill(os.getpid(), number)

    assert (signals.number, signals.exit_code) == (number, code)


def test_while_the_first_is_obeyed_others_do_not_disturb_that(signals: StopSignals) -> None:
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)

    os.kill(os.getpid(), signal.SIGINT)

    assert signals.number == signal.SIGTERM


def test_one_that_was_lost_on_its_way_can_be_repeated(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing has come of the first after seconds."""
    clock = [1000.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: clock[0])
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)

    clock[0] += 11.0

    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)


def test_once_it_is_up_each_is_heard(signals: StopSignals) -> None:
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
    signals.wait()  # returns: one has come

    for _ in range(2):
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_that_is_gone_is_told_twice_and_asks_for_no_hurry(signals: StopSignals) -> None:
    """By its shell and by the kernel."""
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGHUP)
    signals.wait()

    os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.number == signal.SIGTERM


def test_what_was_started_to_outlive_its_terminal_does() -> None:
    """As ``nohup`` starts it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals()

        os.kill(os.getpid(), signal.SIGHUP)

        assert signals.number is None
        signals.ignore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_none_is_heard_where_nothing_may_be_left_half_done(signals: StopSignals) -> None:
    signals.ignore()

    os.kill(os.getpid(), signal.SIGINT)

    assert signals.number is None


def test_what_others_make_of_it_is_known_again() -> None:
    wrapped = SystemError("returned a result with an exception set")
    wrapped.__cause__ = Interrupted()

    assert became_of_a_signal(wrapped)
    assert not became_of_a_signal(ValueError())
    assert not became_of_a_signal(None)
