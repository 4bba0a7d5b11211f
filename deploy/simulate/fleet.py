"""Replicas that come and go in virtual time: starting takes a while, leaving waits for the last request.

Time comes in as an argument. A place is one replica's number, used again by a later one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from workers.engine.errors import InvalidRequest


class Phase(Enum):
    """What a place is doing."""

    OFF = "off"
    STARTING = "starting"
    OPEN = "open"
    DRAINING = "draining"


class Change(NamedTuple):
    """A replica is lost, or another stands in its place."""

    time_s: float
    place: int
    is_loss: bool


@dataclass(frozen=True, slots=True)
class Outage:
    """Some time without a replica: it dies with all that it has, and a fresh one comes."""

    place: int
    from_s: float
    to_s: float

    @property
    def changes(self) -> tuple[Change, Change]:
        """Its beginning and its end."""
        return Change(self.from_s, self.place, is_loss=True), Change(self.to_s, self.place, is_loss=False)


def read_outage(text: str, num_places: int) -> Outage:
    """``PLACE:FROM-TO``, the place counted from 0, times in seconds.

    Raises:
        InvalidRequest: it is written otherwise, or there is no such place.
    """
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", text)
    if match is None:
        raise InvalidRequest(f"--outage has {text!r}: it must be PLACE:FROM-TO, such as 3:600-660", "outage")
    place, from_s, to_s = int(match[1]), float(match[2]), float(match[3])
    if place >= num_places or from_s >= to_s:
        raise InvalidRequest(
            f"--outage has {text!r}: there are replicas 0 to {num_places - 1}, and an outage ends after it begins",
            "outage",
        )
    return Outage(place, from_s, to_s)


class Fleet:
    """Places for replicas, some of them taken; ``replica_s`` is what they cost."""

    def __init__(self, num_places: int, num_open: int, start_s: float) -> None:
        """``num_open`` are there from the beginning, new ones take ``start_s``."""
        self.phases = [Phase.OPEN if place < num_open else Phase.OFF for place in range(num_places)]
        self.replica_s = 0.0
        """Seconds of replicas so far: starting, open or draining, since they hold their GPUs."""
        self._start_s = start_s
        self._ready_s = [0.0] * num_places
        self._now_s = 0.0

    @property
    def num_open(self) -> int:
        """Replicas that take requests."""
        return self.phases.count(Phase.OPEN)

    @property
    def num_target(self) -> int:
        """Replicas that are wanted: open or starting."""
        return self.num_open + self.phases.count(Phase.STARTING)

    def scale_to(self, num_replicas: int, now_s: float) -> None:
        """Start or drain until ``num_replicas`` are wanted; those that start go first, then the last places."""
        while self.num_target < min(num_replicas, len(self.phases)) and Phase.OFF in self.phases:
            place = self.phases.index(Phase.OFF)
            self.phases[place] = Phase.STARTING
            self._ready_s[place] = now_s + self._start_s
        while self.num_target > num_replicas:
            if Phase.STARTING in self.phases:
                self.phases[self._last(Phase.STARTING)] = Phase.OFF
            else:
                self.phases[self._last(Phase.OPEN)] = Phase.DRAINING

    def advance(self, now_s: float, is_idle: Callable[[int], bool]) -> list[int]:
        """Let time pass.

        Returns:
            Places whose replicas have opened now, fresh and with empty caches.
        """
        opened = []
        elapsed_s = now_s - self._now_s
        self._now_s = now_s
        for place, phase in enumerate(self.phases):
            self.replica_s += elapsed_s * (phase is not Phase.OFF)
            if phase is Phase.STARTING and self._ready_s[place] <= now_s:
                self.phases[place] = Phase.OPEN
                opened.append(place)
            elif phase is Phase.DRAINING and is_idle(place):
                self.phases[place] = Phase.OFF
        return opened

    def lose(self, place: int) -> None:
        """The replica in this place has died."""
        self.phases[place] = Phase.OFF

    def restore(self, place: int) -> None:
        """A fresh one has opened there."""
        self.phases[place] = Phase.OPEN

    def _last(self, phase: Phase) -> int:
        return len(self.phases) - 1 - self.phases[::-1].index(phase)
