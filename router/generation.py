"""One HTTP request's generation: its choices, their text as it grows, and their way over lost replicas.

All choices share one mailbox and one consumer, so a token costs no task and at most one wake-up; what has
queued up meanwhile is taken together. The consumer must call ``close``: it is what frees the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.proto import shoal_pb2 as pb
from router.explanation import Course
from router.journal import Journal, Loss, Prompt
from router.replica_set import ReplicaSet
from router.text.detokenizer import Detokenizer, TokenTable
from router.text.stop import StopMatcher, StopStrings
from router.trace_recorder import TraceRecorder
from workers.engine.errors import GrammarNotFollowed, InvalidRequest, Overloaded, ShoalError
from workers.engine.request import ChoiceParams, FinishReason

MAX_AT_ONCE = 128
"""Engine requests that one HTTP request has at replicas at a time, so that a long list does not fill a queue."""


ABORTED = "abort"
"""Finish reason of a choice that did not come to an end: the client left, or an error."""


@dataclass(frozen=True, slots=True)
class TextParams:
    """What is done with a choice's tokens on this side of the engine."""

    stop: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    is_silent: bool = False
    """The prompt is all that is asked about: the one token that the engine gives is dropped."""


class Delta(NamedTuple):
    """What one token adds to a choice, or how the choice ends (``finish_reason``, then no token)."""

    choice: Choice
    text: str
    token_id: int | None
    logprobs: pb.TokenLogprobs | None
    finish_reason: str | None


class Choice:
    """One choice of one prompt: the sink of its engine request, and its text so far."""

    __slots__ = (
        "_detokenizer",
        "_is_silent",
        "_mailbox",
        "_stops",
        "course",
        "finish_reason",
        "index",
        "journal",
        "num_cached_tokens",
        "pooled",
        "prompt_logprobs",
        "stop_reason",
    )

    def __init__(
        self, index: int, journal: Journal, table: TokenTable, text: TextParams, mailbox: _Mailbox
    ) -> None:
        self.index = index
        self.journal = journal
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        """The stop string or stop token id that ended it; None for the model's own end."""
        self.num_cached_tokens: int | None = None
        self.course = Course()
        self.prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
        """Of the prompt's tokens from the second on, where ``params.num_prompt_logprobs`` asked for them."""
        self._is_silent = text.is_silent
        self.pooled = b""
        """The prompt's vector, float32 little-endian, where ``params.pooling`` asked for one."""
        self._detokenizer = Detokenizer(table, skip_special_tokens=text.skip_special_tokens)
        self._stops = (
            StopMatcher(text.stop, include_in_output=text.include_stop) if text.stop is not None else None
        )
        self._mailbox = mailbox

    def on_output(self, output: pb.TokenOutput) -> None:
        """Queue an output for the consumer."""
        if self.course.steps is not None:
            load = self.journal.placements[-1].ranked[0].candidate.view.load
            now_s = asyncio.get_running_loop().time()
            self.course.steps.note(now_s, len(output.token_ids), load.num_running, load.num_waiting)
        self._mailbox.put((self, output))

    def on_loss(self, loss: Loss) -> None:
        """Queue the news that the request must go on elsewhere."""
        self._mailbox.put((self, loss))

    def absorb(self, output: pb.TokenOutput, deltas: list[Delta]) -> bool:
        """Turn an output into deltas, token by token.

        Returns:
            True if the choice ended here though the engine goes on (a stop string): cancel it.
        """
        if self.finish_reason is not None:
            return False
        if self.num_cached_tokens is None and output.HasField("num_cached_tokens"):
            self.num_cached_tokens = output.num_cached_tokens
            self.course.first_s = asyncio.get_running_loop().time()
            self.course.waited_s = output.waited_s
            self.course.num_host_cached_tokens = output.num_host_cached_tokens
        if output.pooled:
            self.pooled = output.pooled
        if output.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = list(output.prompt_logprobs)
        if self.journal.params.beams is not None:
            return False
        if self._is_silent:
            if output.token_ids:
                self.end(FinishReason.LENGTH, deltas)
            return not output.finish_reason
        token_ids = output.token_ids
        if token_ids:
            self.course.last_s = asyncio.get_running_loop().time()
        logprobs = output.logprobs
        stop_token_id = output.stop_token_id if output.HasField("stop_token_id") else None
        last = len(token_ids) - 1
        emitted = self.journal.output_token_ids
        for i, token_id in enumerate(token_ids):
            emitted.append(token_id)
            is_stop_token = i == last and token_id == stop_token_id
            text = "" if is_stop_token else self._detokenizer.push(token_id)
            if self._stops is not None:
                text = self._through_stops(text)
            deltas.append(Delta(self, text, token_id, logprobs[i] if i < len(logprobs) else None, None))
            if self._stops is not None and self._stops.matched is not None:
                self.stop_reason = self._stops.matched
                self._finish(FinishReason.STOP, "", deltas)
                return not output.finish_reason
        if output.finish_reason:
            self.course.num_preemptions = output.num_preemptions
            if stop_token_id in self.journal.params.stop_token_ids:
                self.stop_reason = stop_token_id
            self.end(output.finish_reason, deltas)
        return False

    def absorb_beam(self, beam: pb.BeamOutput, deltas: list[Delta]) -> None:
        """Take one of the outputs of a beam search, all of it."""
        stop_token_id = beam.stop_token_id if beam.HasField("stop_token_id") else None
        for token_id in beam.token_ids:
            self.journal.output_token_ids.append(token_id)
            text = "" if token_id == stop_token_id else self._detokenizer.push(token_id)
            deltas.append(Delta(self, text, token_id, None, None))
        if stop_token_id in self.journal.params.stop_token_ids:
            self.stop_reason = stop_token_id
        self.end(beam.finish_reason, deltas)

    def end(self, reason: str, deltas: list[Delta]) -> None:
        """Finish without a stop string: what was held back comes out."""
        text = self._detokenizer.flush()
        if self._stops is not None:
            text = self._stops.feed(text) + self._stops.flush()
            if self._stops.matched is not None:
                reason, self.stop_reason = FinishReason.STOP, self._stops.matched
        self._finish(reason, text, deltas)

    def _through_stops(self, text: str) -> str:
        assert self._stops is not None
        if len(self.journal.output_token_ids) < self.journal.params.min_tokens:
            return self._stops.flush() + text  # nothing can end it yet
        return self._stops.feed(text)

    def _finish(self, reason: str, text: str, deltas: list[Delta]) -> None:
        self.finish_reason = str(reason)
        self.course.last_s = asyncio.get_running_loop().time()
        deltas.append(Delta(self, text, None, None, self.finish_reason))


_Item = tuple[Choice, pb.TokenOutput | Loss]


class _Mailbox:
    """Outputs on their way from streams to the one consumer; bounded, since a client may read slowly."""

    __slots__ = ("_items", "_max_items", "_on_overflow", "_waiter", "has_overflowed")

    def __init__(self, max_items: int, on_overflow: Callable[[], None]) -> None:
        self._items: list[_Item] = []
        self._max_items = max_items
        self._on_overflow = on_overflow
        self._waiter: asyncio.Future[None] | None = None
        self.has_overflowed = False

    def put(self, item: _Item) -> None:
        self._items.append(item)
        if len(self._items) > self._max_items:
            self.has_overflowed = True
            self._items.clear()
            self._on_overflow()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[_Item]:
        """All that has queued up, at least one item."""
        if not self._items and not self.has_overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


class Generation:
    """The choices of one HTTP request on their replicas. One consumer: ``start``, ``next`` ..., ``close``."""

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[ChoiceParams],
        text: TextParams,
        table: TokenTable,
        replicas: ReplicaSet,
        max_unread_outputs: int,
        arrival_s: float,
        recorder: TraceRecorder | None = None,
    ) -> None:
        """``params`` are those of each choice of a prompt: prompts x params engine requests."""
        self.request_id = request_id
        self.prompts = prompts
        self._mailbox = _Mailbox(max_unread_outputs, self.close)
        self.choices = [
            Choice(i, Journal(f"{request_id}-{i}", prompt, choice), table, text, self._mailbox)
            for i, (prompt, choice) in enumerate((p, c) for p in prompts for c in params)
        ]
        self._per_prompt = len(params)
        searches = params[0].beams is not None
        self._requests = self.choices[:: len(params)] if searches else self.choices
        """Choices that are requests to the engine: of a beam search the first of each prompt, which finds all."""
        self.grammar_param: str | None = "grammar"
        self.width_param = "n"
        """The body's field for a beam search's width."""
        """The field of the client's body that asked for a grammar, if one did."""
        self._replicas = replicas
        self.arrival_s = arrival_s
        self.failure: str | None = None
        """What its client was told instead of a whole answer, if anything."""
        self._is_closed = False
        self._recorder = recorder
        self._unplaced: list[Choice] = []
        self._queued: deque[Choice] = deque()
        """Choices that wait for others of this request to end."""
        self._ready: list[Delta] = []

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def outcome(self) -> str:
        """``running``, ``finished``, ``failed: ...``, or ``client left`` before its end."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.is_finished:
            return "finished"
        return "client left" if self._is_closed else "running"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once however many choices it has."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, all choices together."""
        return sum(len(choice.journal.output_token_ids) for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first choice of each prompt found in a cache."""
        return sum(choice.num_cached_tokens or 0 for choice in self.choices[:: self._per_prompt])

    def belong_to(self, tenant: str, cache_salt: str, priority: int) -> None:
        """Before ``start``: put it under its caller's name, salt and priority."""
        for prompt in self.prompts:
            prompt.terms = prompt.terms.within(tenant, cache_salt, priority)

    def join_session(self, session: str) -> None:
        """Before ``start``: let it go where the session's other requests go, if that costs nothing."""
        for prompt in self.prompts:
            prompt.terms = replace(prompt.terms, session=session)

    def end_at_once(self) -> None:
        """Ask no replica: nothing is to be generated."""
        for choice in self.choices:
            choice.end(FinishReason.LENGTH, self._ready)

    async def start(self) -> None:
        """Place all choices, or the first of very many, waiting for a replica if there is none.

        Raises:
            Overloaded, ReplicaLost: some choice has no place; ``close`` takes back the others.
        """
        self._queued.extend(self._requests[MAX_AT_ONCE:])
        for choice in self._requests[:MAX_AT_ONCE]:
            if choice.finish_reason is None:
                await self._replicas.place_or_wait(choice.journal, choice, self.arrival_s)

    async def next(self) -> list[Delta]:
        """What has come since the last call, at least one delta; wait for it if need be.

        Raises:
            UserError: the engine refused the request.
            ReplicaLost: a replica was lost and no other could take over.
            GrammarNotFollowed: a form of output was accepted, and could not be followed to its end.
            ShoalError: the engine failed, or the client reads too slowly.
        """
        deltas, self._ready = self._ready, []
        while not deltas:
            while self._unplaced:  # text that came before has been handed out by now
                await self._go_on(self._unplaced.pop(), deltas)
            if deltas:
                break
            for choice, output in await self._mailbox.take():
                if isinstance(output, Loss):
                    self._take_back(choice, output)
                else:
                    self._absorb(choice, output, deltas)
            if self._mailbox.has_overflowed:
                raise Overloaded("the client reads too slowly")
        return deltas

    def close(self) -> None:
        """Cancel what still runs and forget the rest. Safe to call twice."""
        self._is_closed = True
        for choice in self.choices:
            self._replicas.withdraw(choice.journal)
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            age_s = asyncio.get_running_loop().time() - self.arrival_s
            for choice in self._requests:
                recorder.note(choice.journal, age_s)

    def _absorb(self, choice: Choice, output: pb.TokenOutput, deltas: list[Delta]) -> None:
        reason = output.finish_reason
        if reason == FinishReason.ERROR:
            message = output.error or "the engine failed"
            if output.is_user_error and output.error_param == "grammar":
                raise GrammarNotFollowed(f"{self.grammar_param}: {message}", self.grammar_param)
            if output.is_user_error:
                param = self.width_param if output.error_param == "beam_width" else output.error_param
                raise InvalidRequest(message, param or None)
            raise ShoalError(message)
        if reason == FinishReason.ABORT:  # we did not ask for it: the replica cuts its requests off
            self._take_back(choice, Loss.CUT_OFF)
            return
        if choice.absorb(output, deltas) or reason:
            if choice.journal.params.beams is not None:
                self._share_out(choice, output, deltas)
            self._replicas.withdraw(choice.journal)
            if self._queued:
                self._unplaced.append(self._queued.popleft())

    def _share_out(self, first: Choice, output: pb.TokenOutput, deltas: list[Delta]) -> None:
        """Give what a beam search has found to the choices of its prompt, the best to the first."""
        choices = self.choices[first.index : first.index + self._per_prompt]
        if len(output.beams) < len(choices):
            raise ShoalError(f"the beam search found {len(output.beams)} outputs of {len(choices)}")
        for choice, beam in zip(choices, output.beams, strict=False):
            choice.absorb_beam(beam, deltas)

    def _take_back(self, choice: Choice, loss: Loss) -> None:
        self._replicas.withdraw(choice.journal)
        choice.journal.note_loss(loss)
        self._unplaced.append(choice)

    async def _go_on(self, choice: Choice, deltas: list[Delta]) -> None:
        if choice.finish_reason is not None:
            return
        if choice.journal.is_complete:
            choice.end(FinishReason.LENGTH, deltas)
            return
        await self._replicas.place_or_wait(choice.journal, choice, self.arrival_s)
