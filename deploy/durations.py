"""How long anything may be told to last: what the clocks, sockets and proxies that are handed a duration can take.

Settings, files and options have durations in fields whose names end in ``_s``.
"""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

MOST_S = 7 * 24 * 3600
"""A week, in seconds: the shortest of the clocks, HAProxy's of 2^31 ms, takes three; nothing here lasts so long."""

Seconds = Annotated[float, Field(le=MOST_S)]
"""A duration as a field of settings or of a file."""


def seconds(text: str) -> float:
    """A duration as an option of ``argparse``.

    Raises:
        argparse.ArgumentTypeError: it is no number from 0 to ``MOST_S``.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {MOST_S} (a week)")
    return value
