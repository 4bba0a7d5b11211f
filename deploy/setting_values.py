"""What values of settings must be, as types of fields: for settings and files alike; knows no setting's other fields.

Their checks raise ``ValueError``, to which pydantic adds the field's name, and its value where that is one word.
"""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from workers.engine.errors import InvalidRequest

MOST_NAME_CHARS = 256
"""Of a model's name: more than a file's or a repository's has."""
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


def checked_name(name: str) -> str:
    """What clients call a model, in bodies, addresses (``/v1/models/NAME``) and logs.

    Raises:
        ValueError: it cannot be told or found there; the message names it, or its beginning.
    """
    if len(name) > MOST_NAME_CHARS:
        raise ValueError(
            f"a name that begins with {name[:40]!r} has {len(name):,} characters: give {MOST_NAME_CHARS} at most"
        )
    if not name.isprintable():
        raise ValueError(
            f"{name!r} has characters that cannot be shown, as ends of lines: give a name without"
        )
    if name != name.strip() or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ValueError(
            f"{name!r} cannot be part of an address: give a name without blanks or / at its ends, and without //, . or "
            ".. between two /"
        )
    return name


def checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Several such names; raises as ``checked_words`` and ``checked_name`` do."""
    return tuple(map(checked_name, checked_words(names)))


def checked_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys that callers can send in a header.

    Raises:
        ValueError: one cannot be sent, or ``checked_words`` refuses them; the message names none.
    """
    for key in checked_words(keys):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(
                "a key holds blanks, ends of lines or letters outside ASCII, which no header can carry"
            )
    return keys


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


def check_variables() -> None:
    """Return if the variables that other programs read, too, are unset or addresses of HTTP.

    Raises:
        InvalidRequest: one is none.
    """
    for name in ("HF_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        value = os.environ.get(name)
        try:
            checked_url(value or "http://unset")
        except ValueError as error:
            raise InvalidRequest(f"{name} is {value!r}: {error}, or unset it", name) from None


def checked_host(host: str) -> str:
    """An interface to listen on.

    Raises:
        ValueError: it can be no address.
    """
    if not host or any(character.isspace() for character in host):
        raise ValueError("must be an address such as 127.0.0.1 or 0.0.0.0")
    return host


Name = Annotated[str, AfterValidator(checked_name)]
Names = Annotated[tuple[str, ...], NoDecode, AfterValidator(checked_names), BeforeValidator(split_words)]
Host = Annotated[str, AfterValidator(checked_host)]
HttpAddress = Annotated[
    str, AfterValidator(checked_url), Field(json_schema_extra={"pattern": r"^https?://[^/\s]"})
]
"""The check says what to write; the pattern is for the chart."""
# What is checked is a list by then, which no message shows: keys are among it.
Words = Annotated[tuple[str, ...], NoDecode, AfterValidator(checked_words), BeforeValidator(split_words)]
Gib = Annotated[float, Field(le=MOST_GIB)]
"""An amount of memory, GiB."""
Keys = Annotated[tuple[str, ...], NoDecode, AfterValidator(checked_keys), BeforeValidator(split_words)]
BodyBytes = Annotated[int, Field(ge=1024, le=1 << 30)]
"""Length of a message; gRPC counts it in 31 bits."""
