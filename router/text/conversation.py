"""What a chat template is to be shown, before it is: how much text that is, and the text that came of it.

Knows no bodies: whoever has one says how its messages are spelled in the template's words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from router.text.chat_template import Message, TemplateOptions


def num_chars(value: object) -> int:
    """Characters of all text in ``value``, at whatever depth and under whatever name; names of objects count, too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, BaseModel):
        return sum(num_chars(one) for _, one in value)
    if isinstance(value, Mapping):
        return sum(len(str(name)) + num_chars(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(num_chars, value))
    return 0 if value is None else len(str(value))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else a template is shown, as they came."""

    num_chars: int
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
        """Count what ``given`` and ``options`` hold, whatever fields those are.

        ``contents`` are those of the messages.
        """
        shown = (options.tools, options.kwargs)
        return cls(num_chars(given) + num_chars(shown), sum(map(len, contents)), spelled, options)


@dataclass(frozen=True, slots=True)
class ChatText:
    """What a template made of a conversation: pieces of text, in every second of which nothing is a control token."""

    pieces: Sequence[str]

    @property
    def num_chars(self) -> int:
        """Characters of the whole."""
        return sum(map(len, self.pieces))
