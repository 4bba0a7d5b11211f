"""What values of settings must be, beyond types and bounds; knows no setting's other fields.

Raises ``ValueError``, to which pydantic adds the field's name, and its value where that is one word.
"""

from __future__ import annotations

from urllib.parse import urlsplit


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


def checked_url(value: str | None, what_for: str) -> str | None:
    """An address of HTTP, or None.

    Raises:
        ValueError: it is none; the message begins with ``what_for``.
    """
    if value is None:
        return value
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, half an IPv6 address
        is_url = False
    if not is_url:
        raise ValueError(f"{what_for}: give http:// or https:// before host and port")
    return value
