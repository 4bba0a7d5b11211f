"""Whether a caller may have a request now, and what each caller has used. Knows no HTTP; the clock comes in.

Limits are the whole endpoint's. Each of its ingress processes enforces a share: the balancer spreads requests
evenly, and nothing is asked over the network per request. Shares of whole numbers add up to the limit exactly, but a
limit below the number of processes lets one in at each: with less, most requests of a caller at rest would be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.tenancy.keys import Tenant
from router.tenancy.window import WINDOW_S, Window
from workers.engine.errors import Forbidden, RateLimited, ShuttingDown


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each limit this process enforces: it is number ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def of(self, limit: float) -> float:
        """This process's part of a limit; of whole numbers, whole and at least 1."""
        if limit != int(limit):
            return limit / self.size
        whole, rest = divmod(int(limit), self.size)
        return float(max(1, whole + (self.rank < rest)))


@dataclass(slots=True)
class Usage:
    """What one caller has used of one model since start; read by the metrics."""

    num_requests: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit a minute, how much of it is left, and seconds until all of it is."""

    limit: float
    remaining: float
    reset_s: float


@dataclass(slots=True)
class _State:
    """One caller at this process."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    num_running: int = 0


class Admission:
    """A request that was let in; ``end`` gives its place back and counts its output."""

    __slots__ = ("_gate", "_has_ended", "_model", "_tenant")

    def __init__(self, gate: Gate, tenant: Tenant, model: str) -> None:
        self._gate, self._tenant, self._model = gate, tenant, model
        self._has_ended = False

    def end(self, num_output_tokens: int) -> None:
        """The request is over, however it ended. Safe to call twice."""
        if not self._has_ended:
            self._has_ended = True
            self._gate.release(self._tenant, self._model, num_output_tokens)


class Gate:
    """Lets callers in as far as their limits reach."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.read_share: Callable[[], Share] = Share
        """What this process's share is now; asked at each request, since processes come and go."""
        self.usage: dict[tuple[str, str], Usage] = {}
        self._states: dict[str, _State] = {}
        self.is_closed = False
        """Nobody is let in any more."""

    @property
    def num_running(self) -> int:
        """Requests that were let in and are not over."""
        return sum(state.num_running for state in self._states.values())

    def admit(self, tenant: Tenant, names: tuple[str, ...], num_prompt_tokens: int) -> Admission:
        """Let a request in; its output tokens are counted when it ends.

        Args:
            names: all that the model is called, the reported name first.

        Raises:
            Forbidden: the key is not for this model.
            RateLimited: a limit is reached; nothing was counted but the refusal.
            ShuttingDown: it is closed.
        """
        if self.is_closed:
            raise ShuttingDown("this endpoint is being stopped: send the request to another, or later")
        model = names[0]
        if not any(tenant.may_use(name) for name in names):
            raise Forbidden(f"the API key {tenant.name!r} is not for model {model!r}", "model")
        usage = self._usage(tenant, model)
        state = self._states.setdefault(tenant.name, _State())
        now_s = self._clock()
        try:
            self._check(tenant, state, num_prompt_tokens, now_s)
        except RateLimited:
            usage.num_refused += 1
            raise
        state.requests.add(1, now_s)
        state.tokens.add(num_prompt_tokens, now_s)
        state.num_running += 1
        usage.num_requests += 1
        usage.num_prompt_tokens += num_prompt_tokens
        return Admission(self, tenant, model)

    @contextmanager
    def visit(self, tenant: Tenant, names: tuple[str, ...]) -> Iterator[None]:
        """Let in a request that no replica will see; it counts among the key's requests, and uses no tokens.

        Raises:
            Forbidden, RateLimited, ShuttingDown: as ``admit``.
        """
        admission = self.admit(tenant, names, 0)
        try:
            yield
        finally:
            admission.end(0)

    def budgets(self, tenant: Tenant) -> dict[str, Budget]:
        """What is left of the key's own limits a minute: ``requests``, ``tokens``; only those that it has.

        What is left is of this process's share, so that whoever goes by it is not refused here; the limit is whole.
        """
        state = self._states.get(tenant.name) or _State()
        now_s = self._clock()
        return {
            what: Budget(
                limit, max(0.0, self.read_share().of(limit) - window.used(now_s)), window.reset_s(now_s)
            )
            for what, window, limit in _limits(tenant, state)
        }

    def release(self, tenant: Tenant, model: str, num_output_tokens: int) -> None:
        """An admitted request is over; called by its ``Admission``."""
        state = self._states[tenant.name]
        state.num_running -= 1
        state.tokens.add(num_output_tokens, self._clock())
        self._usage(tenant, model).num_output_tokens += num_output_tokens

    def _check(self, tenant: Tenant, state: _State, num_prompt_tokens: int, now_s: float) -> None:
        if tenant.max_concurrency is not None and state.num_running >= self.read_share().of(
            tenant.max_concurrency
        ):
            raise RateLimited(
                f"{tenant.max_concurrency} requests at once is the limit of key {tenant.name!r}: "
                "wait for one to end",
                1.0,
            )
        for what, window, limit in _limits(tenant, state):
            amount = 1 if what == "requests" else num_prompt_tokens
            wait_s = window.wait_s(amount, self.read_share().of(limit), now_s)
            if wait_s > 0:
                wait_s = min(wait_s, WINDOW_S)
                raise RateLimited(
                    f"{limit:g} {what} a minute is the limit of key {tenant.name!r}: try again in {wait_s:.0f} s",
                    wait_s,
                )

    def _usage(self, tenant: Tenant, model: str) -> Usage:
        return self.usage.setdefault((tenant.name, model), Usage())


def _limits(tenant: Tenant, state: _State) -> list[tuple[str, Window, float]]:
    """What a key limits a minute, with what it has used of it."""
    limits = (
        ("requests", state.requests, tenant.requests_per_minute),
        ("tokens", state.tokens, tenant.tokens_per_minute),
    )
    return [(what, window, limit) for what, window, limit in limits if limit is not None]
