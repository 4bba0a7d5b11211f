"""What a chat template is to be shown, before it is: how much that is, and the text that came of it.

Knows no bodies: whoever has one says how its messages are spelled in the template's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import to_json

from router.text.chat_template import Message, TemplateOptions


def num_bytes(value: object) -> int:
    """Bytes of all that is in ``value``, at whatever depth and under whatever name, as JSON.

    A walk in Python would take a second for as many messages as a body may hold.
    """
    return len(to_json(value, exclude_none=True))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else a template is shown, as they came."""

    num_bytes: int
    """Of everything: it says how long the work on it takes."""
    num_content_chars: int
    """Of the messages' contents, which every template shows."""
    spelled: Callable[[], Sequence[Message]]
    """Brings the messages into the template's words; for any thread."""
    options: TemplateOptions

    @classmethod
    def of(
        cls,
        given: Sequence[BaseModel],
        contents: Sequence[str],
        spelled: Callable[[], Sequence[Message]],
        options: TemplateOptions,
    ) -> Conversation:
        """Measure what ``given`` and ``options`` hold, whatever fields those are.

        ``contents`` are those of the messages.
        """
        size = num_bytes((given, options.tools, options.kwargs))
        return cls(size, sum(map(len, contents)), spelled, options)


@dataclass(frozen=True, slots=True)
class ChatText:
    """What a template made of a conversation: pieces of text, in every second of which nothing is a control token."""

    pieces: Sequence[str]

    @property
    def num_chars(self) -> int:
        """Characters of the whole."""
        return sum(map(len, self.pieces))
