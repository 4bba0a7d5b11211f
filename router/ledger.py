"""What one ingress can tell of the requests that it runs or has run: ``GET /v1/shoal/requests/{id}``.

Bounded in number and bytes, and for a while only; each request is told to the key that made it, to nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from router.explanation import MAX_CANDIDATES, explanation
from router.generation import Generation

KEPT_S = 600.0
"""For how long an ended request can be asked about."""
MAX_ENDED = 4096
"""Ended requests that are kept; about 1 kB each with a few replicas."""
MAX_BYTES = 16 << 20
"""Of all that is kept."""
MAX_CHOICES = 16
"""Told of each request, the first: a list of thousands of prompts is one request."""


@dataclass(frozen=True, slots=True)
class _Running:
    generation: Generation
    http_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class _Ended:
    told: bytes
    http_id: str
    tenant: str
    until_s: float


class Ledger:
    """Requests by id: their own (``cmpl-...``) or that of the HTTP request (``x-request-id``)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._num_bytes = 0
        self._own_ids: dict[tuple[str, str], str] = {}
        """Callers and ids of their HTTP requests -> their generations'; where one is used twice, the last counts."""

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def num_ended(self) -> int:
        """Ended requests that can be asked about."""
        return len(self._ended)

    @property
    def num_bytes(self) -> int:
        """What is kept of them."""
        return self._num_bytes

    def begin(self, generation: Generation, http_id: str, tenant: str) -> None:
        """A request of ``tenant`` begins."""
        self._running[generation.request_id] = _Running(generation, http_id, tenant)
        self._own_ids[tenant, http_id] = generation.request_id

    def end(self, generation: Generation) -> None:
        """It is over, however it ended."""
        running = self._running.pop(generation.request_id)
        told = _tell(running, "ended")
        self._ended[generation.request_id] = _Ended(
            told, running.http_id, running.tenant, self._clock() + KEPT_S
        )
        self._num_bytes += len(told)
        self._forget_old()

    def find(self, request_id: str, tenant: str) -> bytes:
        """What is known of a request of ``tenant``, as JSON; empty if it has none of this id here."""
        self._forget_old()
        own_id = self._own_ids.get((tenant, request_id), request_id)
        running = self._running.get(own_id)
        if running is not None:
            return _tell(running, "running") if running.tenant == tenant else b""
        ended = self._ended.get(own_id)
        return ended.told if ended is not None and ended.tenant == tenant else b""

    def check(self) -> None:
        """Raise ``AssertionError`` if an id leads nowhere."""
        known = self._running.keys() | self._ended.keys()
        assert set(self._own_ids.values()) <= known, "an id leads to a request that is forgotten"
        assert self._num_bytes == sum(len(one.told) for one in self._ended.values()), "bytes are miscounted"

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._ended:
            request_id, ended = next(iter(self._ended.items()))
            is_full = len(self._ended) > MAX_ENDED or self._num_bytes > MAX_BYTES
            if not is_full and ended.until_s > now_s:
                return
            del self._ended[request_id]
            self._num_bytes -= len(ended.told)
            if self._own_ids.get((ended.tenant, ended.http_id)) == request_id:
                del self._own_ids[ended.tenant, ended.http_id]


def _tell(running: _Running, state: str) -> bytes:
    generation = running.generation
    return orjson.dumps(
        {
            "object": "shoal.request",
            "id": generation.request_id,
            "state": state,
            **explanation(generation, running.http_id, MAX_CANDIDATES, MAX_CHOICES),
        }
    )
