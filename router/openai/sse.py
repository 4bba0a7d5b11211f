"""Server-sent events of a stream: one chunk per token, of which only the text is encoded anew."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChunkFrame:
    """All of a stream's chunks but what changes: their JSON is built once, when the stream begins.

    ``opening`` and ``closing`` are what stands around the text: ``"delta":{"content":`` and ``}`` in chat,
    ``"text":`` and nothing in completions.
    """

    __slots__ = ("_closing", "_heads", "_opening", "_tail", "_text_heads", "_text_tail")

    def __init__(
        self,
        envelope: dict[str, Any],
        num_choices: int,
        *,
        opening: bytes,
        closing: bytes,
        with_usage: bool,
    ) -> None:
        start = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":[{"index":'
        self._heads = [start + b"%d," % index for index in range(num_choices)]
        self._text_heads = [head + opening for head in self._heads]
        self._opening = opening
        self._closing = closing
        self._tail = b'}],"usage":null}\n\n' if with_usage else b"}]}\n\n"
        self._text_tail = closing + b',"logprobs":null,"finish_reason":null' + self._tail

    def text(self, index: int, text: str) -> bytes:
        """A chunk with more text."""
        return self._text_heads[index] + orjson.dumps(text) + self._text_tail

    def text_with_logprobs(self, index: int, text: str, logprobs: Any) -> bytes:
        """A chunk with more text and its log-probabilities."""
        return b"".join(
            (
                self._text_heads[index],
                orjson.dumps(text),
                self._closing,
                b',"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":null',
                self._tail,
            )
        )

    def other(self, index: int, fields: dict[str, Any]) -> bytes:
        """A chunk that begins or ends a choice."""
        return self._heads[index] + orjson.dumps(fields)[1:-1] + self._tail


def event(body: dict[str, Any]) -> bytes:
    """Any object as one event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"
