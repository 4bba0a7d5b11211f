"""An actor's process is known before the actor answers; one that Ray has none for is made anew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import actor_process
from cluster.actor_process import ActorProcess, find_process, process_of


async def test_the_process_is_told_as_soon_as_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "0a"))
    rows: list[dict[str, Any]] = [
        {},  # not in the table yet
        {"State": "PENDING_CREATION", "Pid": 0, "Address": {"NodeID": ""}},
        {"State": "PENDING_CREATION", "Pid": 7, "Address": {"NodeID": "node"}},
    ]
    monkeypatch.setattr("ray._private.state.actors", lambda id_: rows.pop(0) if id_ == "0a" else {})

    assert await asyncio.wait_for(process_of(actor), 20) == ActorProcess("node", 7)
    assert rows == []


Table = dict[str, "asyncio.Future[ActorProcess]"]


@pytest.fixture
async def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """What is known of actors that are named by letters, once it is; filled in by the test."""
    found = {name: asyncio.get_running_loop().create_future() for name in "abc"}

    async def look(actor: str) -> ActorProcess:
        return await found[actor]

    monkeypatch.setattr(actor_process, "process_of", look)
    return found


async def test_an_actor_that_gets_no_process_is_made_anew(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr("ray.kill", killed.append)
    table["b"].set_result(ActorProcess("node", 2))

    found = await asyncio.wait_for(find_process("a", lambda: "b", 0.01), 20)

    assert (found, killed) == (ActorProcess("node", 2), ["a"])


async def test_a_machine_that_takes_its_time_is_given_it(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr("ray.kill", killed.append)
    later = iter("bc")

    def make() -> str:
        name = next(later)
        if name == "c":  # the last one, for which there is no limit
            asyncio.get_running_loop().call_later(0.5, table["c"].set_result, ActorProcess("node", 3))
        return name

    found = await asyncio.wait_for(find_process("a", make, 0.01), 20)

    assert (found, killed) == (ActorProcess("node", 3), ["a", "b"])
