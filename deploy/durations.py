"""How long anything may be told to last: what the clocks, sockets and proxies that are handed a duration can take.

Settings, files and options have durations in fields whose names end in ``_s``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_S = 7 * 24 * 3600
"""A week, in seconds: the shortest of the clocks, HAProxy's of 2^31 ms, takes three; nothing here lasts so long."""

Seconds = Annotated[float, Field(le=MOST_S)]
"""A duration as a field of settings or of a file."""
