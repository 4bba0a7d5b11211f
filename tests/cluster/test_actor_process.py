"""An actor's process is known before the actor answers, however late Ray chooses one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actor_process import ActorProcess, process_of


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
