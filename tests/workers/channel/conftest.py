"""Endpoints of every kind, and ranks that live in threads of the test."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.channel.link import BrainLink, RankLink, connect, listen
from workers.engine.plan import StepPlan


@pytest.fixture(params=["unix:@", "unix:/", "ipc://", "tcp://"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """An endpoint that nobody else has, one of each kind."""
    if request.param.startswith("unix:") and sys.platform != "linux":
        pytest.skip("shared memory with doorbells is of Linux")
    if request.param == "unix:@":
        return f"unix:@{tmp_path}"
    if request.param == "unix:/":
        return f"unix:{tmp_path}/steps"
    if request.param == "ipc://":
        return f"ipc://{tmp_path}/steps#key"
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}#key"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Where ranks run; each test ends them by closing the brain's end."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@dataclass
class Group:
    """Both ends of one channel."""

    brain: BrainLink
    ranks: list[RankLink] = field(default_factory=list)


@pytest.fixture
def make_group(endpoint: str, threads: ThreadPoolExecutor) -> Iterator[Callable[[int], Group]]:
    """A brain's link with so many ranks connected to it."""
    with ExitStack() as stack:

        def make(num_ranks: int) -> Group:
            brain = listen(endpoint, num_ranks)
            stack.callback(brain.close)
            dialed: list[Future[RankLink]] = [
                threads.submit(connect, endpoint, rank, 10.0) for rank in range(num_ranks)
            ]
            brain.wait_for_ranks(10.0)
            group = Group(brain, [future.result() for future in dialed])
            for rank in group.ranks:
                stack.callback(rank.close)
            return group

        yield make


def make_plan(step_id: int = 0, num_rows: int = 2) -> StepPlan:
    """A decode step."""
    rows = list(range(num_rows))
    return StepPlan(step_id, [], rows, [5] * num_rows, [1] * num_rows, [True] * num_rows, [[]] * num_rows)


@pytest.fixture(name="make_plan")
def make_plan_fixture() -> Callable[..., StepPlan]:
    """The builder, for tests that cannot import it."""
    return make_plan
