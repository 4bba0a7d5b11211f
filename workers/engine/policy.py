"""Who is served first: a policy gives each request its turn when it is taken up.

The same order decides who is admitted, who is scheduled and, read backwards, who is preempted.
"""

from __future__ import annotations

from typing import Protocol

from workers.engine.config import EngineConfig
from workers.engine.request import EngineRequest

Turn = tuple[float, int]
"""Lower is served first. The last part is the order of arrival, so no two are equal."""

_OUTPUT_PRICE = 4.0
"""Of an output token beside a prompt token's 1: what providers ask for, and about what a step costs beside prefill."""
_MOST_TENANTS = 1000
"""Whose counts are kept once there are twice as many."""


class Policy(Protocol):
    """Orders requests."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The turn of ``request``, the ``arrival``-th taken up. It holds for the request's whole life."""
        ...

    def ended(self, request: EngineRequest, num_output_tokens: int) -> None:
        """The request has ended after as many output tokens, those generated elsewhere included."""
        ...

    def released(self, request: EngineRequest) -> None:
        """The request has gone before anything of it was computed."""
        ...


class Fcfs:
    """First come, first served."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The order of arrival alone."""
        return (0, arrival)

    def ended(self, request: EngineRequest, num_output_tokens: int) -> None:
        """Changes nothing."""

    def released(self, request: EngineRequest) -> None:
        """Changes nothing."""


class Priority:
    """Lowest ``priority`` first; first come, first served among equals."""

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The request's own priority, then the order of arrival."""
        return (request.priority, arrival)

    def ended(self, request: EngineRequest, num_output_tokens: int) -> None:
        """Changes nothing."""

    def released(self, request: EngineRequest) -> None:
        """Changes nothing."""


class FairShare:
    """Tenants share the engine by tokens: who has been promised less is served first.

    Each request is tagged with its tenant's count of tokens, which it then raises by its own: prompt and, four times,
    output. A tenant that was away starts from the least tag of those that are here, so none saves up. What a request
    did not use of its ``max_tokens`` is given back when it ends. Source: Sheng et al. 2024, "Fairness in serving large
    language models" (virtual token counters), on the tags of Goyal et al. 1996, "Start-time fair queueing".
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        """Of each tenant with a request here, and of a few that have left: tokens promised."""
        self._tags: dict[str, float] = {}
        """Of each request that has not ended."""
        self._least = 0.0
        """No tenant starts below it."""

    @property
    def num_tenants(self) -> int:
        """Those whose counts are kept."""
        return len(self._counts)

    def turn(self, request: EngineRequest, arrival: int) -> Turn:
        """The tenant's count, then the order of arrival."""
        self._least = max(self._least, min(self._tags.values(), default=self._least))
        tag = max(self._counts.get(request.tenant, 0.0), self._least)
        self._counts[request.tenant] = tag + _price(request, _most_tokens(request))
        self._tags[request.request_id] = tag
        if len(self._counts) > 2 * _MOST_TENANTS:
            self._forget_some()
        return (tag, arrival)

    def _forget_some(self) -> None:
        """Keep the counts of those who have been promised most: the others lose least by beginning anew."""
        by_count = sorted(self._counts.items(), key=lambda item: -item[1])
        self._counts = {tenant: count for tenant, count in by_count[:_MOST_TENANTS] if count > self._least}

    def ended(self, request: EngineRequest, num_output_tokens: int) -> None:
        """Give back what was promised and not used."""
        self._give_back(request, _price(request, _most_tokens(request)) - _price(request, num_output_tokens))

    def released(self, request: EngineRequest) -> None:
        """Give back all that was promised."""
        self._give_back(request, _price(request, _most_tokens(request)))

    def _give_back(self, request: EngineRequest, unused: float) -> None:
        self._tags.pop(request.request_id, None)
        if request.tenant in self._counts:
            self._counts[request.tenant] -= unused
        if not self._tags:  # nobody is here: all begin equal
            self._least = max([self._least, *self._counts.values()])


def _most_tokens(request: EngineRequest) -> int:
    return request.params.max_tokens * request.params.num_rows


def _price(request: EngineRequest, num_output_tokens: int) -> float:
    return len(request.prompt_token_ids) + _OUTPUT_PRICE * num_output_tokens


def make_policy(config: EngineConfig) -> Policy:
    """The policy that ``config`` names."""
    policies: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority, "fair": FairShare}
    return policies[config.policy]()
