"""Requests in the order of their turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from workers.engine.policy import Turn
from workers.engine.request_state import RequestState


class RequestQueue:
    """A sorted list: the request to be served first stands first. No two have the same turn."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[RequestState]:
        return reversed(self._requests)

    @property
    def first(self) -> RequestState:
        """The next one to be served. The queue must not be empty."""
        return self._requests[0]

    def add(self, request: RequestState) -> None:
        """Put a request at its place: usually the end, nearer the front after a preemption."""
        self._requests.insert(self._index(request), request)

    def remove(self, request: RequestState) -> None:
        """Take out a request that is here."""
        index = self._index(request)
        assert self._requests[index] is request, f"request {request.request_id} is not in this queue"
        del self._requests[index]

    def copy(self) -> list[RequestState]:
        """The requests in order, for iterating while the queue changes."""
        return self._requests.copy()

    def check(self) -> None:
        """Raise ``AssertionError`` if the order is broken."""
        turns = [request.turn for request in self._requests]
        assert all(a < b for a, b in pairwise(turns)), "a request queue is out of order"

    def _index(self, request: RequestState) -> int:
        return bisect_left(self._requests, request.turn, key=_turn)


def _turn(request: RequestState) -> Turn:
    return request.turn
