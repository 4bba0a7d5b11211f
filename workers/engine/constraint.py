"""What limits a request's next token besides its numbers: a grammar, and the budget of its thinking.

Masks are made in the brain, of token ids alone, and go to the ranks in plans. A mask that depends on a token
still being sampled is *deferred*: its row is computed with all others, only its sampling waits for the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.engine.errors import ShoalError
from workers.engine.plan import TokenMask
from workers.engine.request import ChoiceParams
from workers.engine.request_state import RequestState


class GrammarFailed(ShoalError):
    """A grammar can go no further: it grew too complex, or was given a token that it forbids."""


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow but the end."""
        ...

    def prepare(self, others: Sequence[Matcher]) -> None:
        """Make the next masks of this matcher and of some others side by side, where that is faster."""
        ...

    def mask(self) -> bytes:
        """Which tokens may come next, a bit each: token ``i`` is bit ``i % 8`` of byte ``i // 8``.

        Raises:
            GrammarFailed: the grammar is too complex here.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token of the output.

        Raises:
            GrammarFailed: it is none that ``mask`` allows.
        """
        ...


class Constraint:
    """Follows one output; says what may come next. Errors are kept, for the engine to end the request with."""

    __slots__ = ("_budget", "_end", "_matcher", "_num_thought", "_tail", "error", "is_thinking")

    def __init__(self, matcher: Matcher | None, params: ChoiceParams) -> None:
        """Begin before the first output token; the grammar is in force once thinking has ended, if there is any."""
        self._matcher = matcher
        self._end = params.thinking_end
        self._budget = params.thinking_budget
        self._num_thought = 0
        self._tail: list[int] = []
        """As much of the end of thinking as stands at the end of the output."""
        self.is_thinking = bool(params.thinking_end)
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        """True if the grammar lets nothing follow."""
        return not self.is_thinking and self._matcher is not None and self._matcher.is_complete

    @property
    def masking(self) -> Matcher | None:
        """The matcher that the next mask will be asked of; None if it takes none."""
        return None if self.is_thinking or self.error is not None else self._matcher

    def depends_on(self, num_unknown: int) -> bool:
        """True if what comes next cannot be told while the last ``num_unknown`` tokens are unknown."""
        if num_unknown == 0:
            return False
        if self._matcher is not None:
            return True
        return self.is_thinking and self._is_spent(self._num_thought + num_unknown)

    def mask(self) -> bytes | None:
        """Which tokens may come next, as ``Matcher.mask`` says it; None: all."""
        if self.is_thinking:
            return _only(self._end[len(self._tail)]) if self._is_spent(self._num_thought) else None
        if self._matcher is None or self.error is not None:
            return None
        try:
            return self._matcher.mask()
        except GrammarFailed as error:
            self.error = str(error)
            return None

    def accept(self, token_id: int) -> None:
        """Take the next token of the output; see ``error`` afterwards."""
        if self.is_thinking:
            self._think(token_id)
        elif self._matcher is not None and self.error is None:
            try:
                self._matcher.accept(token_id)
            except GrammarFailed as error:
                self.error = str(error)

    def _think(self, token_id: int) -> None:
        self._num_thought += 1
        tail = [*self._tail, token_id]
        while tail and tuple(tail) != self._end[: len(tail)]:
            del tail[0]
        self._tail = tail
        self.is_thinking = len(tail) < len(self._end)

    def _is_spent(self, num_thought: int) -> bool:
        return self._budget is not None and num_thought >= self._budget


def masks_of(sampling: Sequence[RequestState]) -> tuple[list[TokenMask], list[int]]:
    """Masks for requests that a plan has just scheduled to sample, and the places of those that must wait."""
    constrained: list[tuple[int, Constraint]] = []
    deferred: list[int] = []
    for place, request in enumerate(sampling):
        constraint = request.constraint
        if constraint is None:
            continue
        num_unknown = request.num_in_flight - 1
        if constraint.depends_on(num_unknown):
            request.awaits_mask = True
            deferred.append(place)
        elif num_unknown == 0:
            constrained.append((place, constraint))
    return _masks(constrained), deferred


def late_masks_of(sampling: Sequence[RequestState], deferred: Sequence[int]) -> list[TokenMask]:
    """Masks for the deferred places of a step whose earlier tokens are all known by now."""
    constrained: list[tuple[int, Constraint]] = []
    for place in deferred:
        request = sampling[place]
        assert request.constraint is not None, "only a constrained request is deferred"
        request.awaits_mask = False
        # Of a request that has ended the token is thrown away: anything may be sampled.
        if not request.is_finished:
            constrained.append((place, request.constraint))
    return _masks(constrained)


def _masks(constrained: Sequence[tuple[int, Constraint]]) -> list[TokenMask]:
    """The masks of some places; no mask where all tokens may come."""
    matchers = [matcher for _, constraint in constrained if (matcher := constraint.masking) is not None]
    if len(matchers) > 1:
        matchers[0].prepare(matchers[1:])
    found = ((place, constraint.mask()) for place, constraint in constrained)
    return [TokenMask(place, mask) for place, mask in found if mask is not None]


def _only(token_id: int) -> bytes:
    mask = bytearray(token_id // 8 + 1)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)
