"""The items of a response while they grow: reasoning, a message, calls; as events, and as the whole list."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

Event = tuple[str, dict[str, Any]]
"""Its type without ``response.``, and its fields."""


class ResponseItems:
    """Fed with deltas as chat completions have them; one item is open at a time."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items, the open one as it is now."""
        return self._items

    def feed(self, part: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take a delta of the message: content, reasoning or calls."""
        events: list[Event] = []
        if part.get("reasoning_content"):
            item = self._opened("reasoning", events)
            events.append(self._grow_text(item, "reasoning_text", part["reasoning_content"]))
        if part.get("content") or logprobs:
            item = self._opened("message", events)
            event = self._grow_text(item, "output_text", part.get("content") or "")
            item["content"][0]["logprobs"] += logprobs
            event[1]["logprobs"] = list(logprobs)
            events.append(event)
        for call in part.get("tool_calls") or ():
            self._call(call, events)
        return events

    def end(self, status: str) -> list[Event]:
        """Close what is open; an answer without anything is an empty message."""
        events: list[Event] = []
        if not self._items:
            self._opened("message", events)
        self._close(events, status)
        return events

    def _call(self, call: dict[str, Any], events: list[Event]) -> None:
        function = call["function"]
        if "name" in function:  # a call begins
            self._close(events, "completed")
            self._begin(
                events,
                {
                    "type": "function_call",
                    "id": f"fc_{self._response_id}_{len(self._items)}",
                    "call_id": call["id"],
                    "name": function["name"],
                    "arguments": "",
                    "status": "in_progress",
                },
            )
        if function.get("arguments"):
            assert self._open is not None, "arguments follow the beginning of their call"
            self._open["arguments"] += function["arguments"]
            fields = {"item_id": self._open["id"], "output_index": len(self._items) - 1}
            events.append(("function_call_arguments.delta", {**fields, "delta": function["arguments"]}))

    def _opened(self, kind: str, events: list[Event]) -> dict[str, Any]:
        """The open item if it is of this kind, else a new one."""
        if self._open is not None and self._open["type"] == kind:
            return self._open
        self._close(events, "completed")
        number = len(self._items)
        if kind == "message":
            item: dict[str, Any] = {
                "type": "message",
                "id": f"msg_{self._response_id}_{number}",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {
                "type": "reasoning",
                "id": f"rs_{self._response_id}_{number}",
                "summary": [],
                "content": [],
            }
            part = {"type": "reasoning_text", "text": ""}
        self._begin(events, item)
        item["content"].append(part)
        events.append(("content_part.added", {**self._place(item), "part": dict(part)}))
        return item

    def _begin(self, events: list[Event], item: dict[str, Any]) -> None:
        self._open = item
        self._items.append(item)
        events.append(
            ("output_item.added", {"output_index": len(self._items) - 1, "item": copy.deepcopy(item)})
        )

    def _grow_text(self, item: dict[str, Any], kind: str, text: str) -> Event:
        item["content"][0]["text"] += text
        return f"{kind}.delta", {**self._place(item), "delta": text}

    def _close(self, events: list[Event], status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        place = self._place(item)
        if item["type"] == "function_call":
            fields = {"item_id": item["id"], "output_index": place["output_index"]}
            events.append(
                (
                    "function_call_arguments.done",
                    {**fields, "name": item["name"], "arguments": item["arguments"]},
                )
            )
        else:
            (part,) = item["content"]
            told = {"text": part["text"], **({"logprobs": part["logprobs"]} if "logprobs" in part else {})}
            events.append((f"{part['type']}.done", {**place, **told}))
            events.append(("content_part.done", {**place, "part": part}))
        if "status" in item:
            item["status"] = status
        events.append(("output_item.done", {"output_index": place["output_index"], "item": item}))

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
