"""A start of Ray that fails is cleared away and tried again, a bounded number of times."""

from __future__ import annotations

import pytest

from deploy.ray_cluster import START_ATTEMPTS, StartError, start_patiently
from deploy.stop_signals import Interrupted


class Attempts:
    """Fails the first ``num_failures`` times; what is done is noted."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")
        if self.done.count("start") <= self.num_failures:
            raise RuntimeError("Traceback ...\nray.exceptions.RaySystemError: The raylet timed out")

    def clear(self) -> None:
        self.done.append("clear")


def test_a_start_that_fails_once_is_cleared_away_and_tried_again() -> None:
    attempts = Attempts(num_failures=1)

    start_patiently(attempts.start, attempts.clear)

    assert attempts.done == ["start", "clear", "start"]


def test_the_last_failure_is_told_in_one_line_with_the_load() -> None:
    attempts = Attempts(num_failures=99)

    with pytest.raises(
        StartError, match=r"in 2 attempts: The raylet timed out\. At the moment \d+ processes"
    ):
        start_patiently(attempts.start, attempts.clear)

    assert attempts.done == ["start", "clear"] * (START_ATTEMPTS - 1) + ["start"]


def test_a_start_that_a_signal_broke_is_not_tried_again() -> None:
    """C code that a signal's exception passes through makes another error of it."""
    done: list[str] = []

    def start() -> None:
        done.append("start")
        try:
            raise Interrupted
        except Interrupted as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(Interrupted):
        start_patiently(start, lambda: done.append("clear"))

    assert done == ["start"]
