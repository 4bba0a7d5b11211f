"""Grammars survive a lost replica: the next one goes on where the first stopped, matcher and parsers included."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "counts": {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 5,
        },
        "code": {"type": "string", "pattern": "^[a-z]{8}$"},
    },
    "required": ["kind", "counts", "code"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "report", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}}
JSON_STREAM = {"response_format": FORMAT}
CALL_STREAM = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def joined(text: str) -> tuple[str, str, str | None]:
    """Content, arguments and finish reason of a stream."""
    content, arguments, reason = "", "", None
    for line in text.split("\n\n"):
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            choice = event["choices"][0]
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                arguments += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return content, arguments, reason


@pytest.mark.parametrize("num_steps", [1, 9, 40])
@pytest.mark.parametrize("fields", [JSON_STREAM, CALL_STREAM], ids=["json", "call"])
async def test_a_stream_goes_on_elsewhere_within_its_grammar(
    make_edge, byte_vocabulary, engine_replica, fields: dict[str, Any], num_steps: int
) -> None:
    replicas = [engine_replica.EngineReplica(byte_vocabulary) for _ in range(3)]
    edge = await make_edge(*replicas)

    async def ask(cut_after: int | None) -> tuple[str, str, str | None]:
        before = [len(replica.requests) for replica in replicas]
        answer = asyncio.create_task(edge.chat(**fields, max_tokens=400, seed=7, temperature=1, stream=True))
        await edge.until(lambda: before != [len(replica.requests) for replica in replicas])
        busy = next(r for r, count in zip(replicas, before, strict=True) if len(r.requests) > count)
        if cut_after is not None:
            num_taken = 0
            while num_taken < cut_after or any(view.num_booked for view in edge.replica_set.open_views):
                busy.step()
                num_taken += 1
                await asyncio.sleep(0.001)
            await busy.kill()
        while not answer.done():
            for replica in replicas:
                if replica is not busy or cut_after is None:
                    replica.step()
            await asyncio.sleep(0.001)
        return joined((await answer).text)

    whole = await ask(None)
    cut = await ask(num_steps)

    assert cut == whole
    content, arguments, reason = cut
    report = json.loads(content or arguments)
    assert report["kind"] in ("alpha", "beta", "gamma")
    assert len(report["code"]) == 8
    assert reason == ("stop" if fields is JSON_STREAM else "tool_calls")
    assert edge.replica_set.counts.num_resumed == 1
