"""What values of settings must be, as types of fields: for settings and files alike; knows no setting's other fields.

Their checks raise ``ValueError``, to which pydantic adds the field's name, and its value where that is one word.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

MOST_GIB = 1 << 30
"""An exbibyte: beyond what any machine has, and its bytes are a number that all arithmetic takes."""


def split_words(value: object) -> object:
    """A list as it is; words between commas, as a variable holds them, as a list."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def checked_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Words that are to be told apart, such as names.

    Raises:
        ValueError: one is empty, or there twice; no word is in the message, since it may be a secret.
    """
    bare = [word.strip() for word in words]
    for number, word in enumerate(bare, 1):
        place = f"number {number} of {len(words)}" if len(words) > 1 else "it"
        if not word:
            raise ValueError(f"{place} is empty, nothing is no value: leave it out")
        if word in bare[: number - 1]:
            raise ValueError(f"{place} is the same as number {bare.index(word) + 1}: give each once")
    return words


def checked_url(value: str) -> str:
    """An address of HTTP.

    Raises:
        ValueError: it is none.
    """
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, half an IPv6 address
        is_url = False
    if not is_url:
        raise ValueError("it is reached by HTTP: give http:// or https:// before host and port")
    return value


def checked_host(host: str) -> str:
    """An interface to listen on.

    Raises:
        ValueError: it can be no address.
    """
    if not host or any(character.isspace() for character in host):
        raise ValueError("must be an address such as 127.0.0.1 or 0.0.0.0")
    return host


Host = Annotated[str, AfterValidator(checked_host)]
HttpAddress = Annotated[
    str, AfterValidator(checked_url), Field(json_schema_extra={"pattern": r"^https?://[^/\s]"})
]
"""The check says what to write; the pattern is for the chart."""
# What is checked is a list by then, which no message shows: keys are among it.
Words = Annotated[tuple[str, ...], NoDecode, AfterValidator(checked_words), BeforeValidator(split_words)]
Gib = Annotated[float, Field(le=MOST_GIB)]
"""An amount of memory, GiB."""
BodyBytes = Annotated[int, Field(ge=1024, le=1 << 30)]
"""Length of a message; gRPC counts it in 31 bits."""
