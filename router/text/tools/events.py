"""What a message is made of, in the order in which it is said."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """More text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """More of the thinking before it."""

    text: str


class CallBegin(NamedTuple):
    """A function is called; its arguments follow."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, as the model spells them."""

    number: int
    text: str


MessageEvent = Content | Reasoning | CallBegin | CallArguments
