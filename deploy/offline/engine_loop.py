"""Drives the engine and its ranks in this process until all requests that were added have ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tqdm import tqdm

from deploy.offline.held_interrupts import HeldInterrupts, interrupts_held
from deploy.offline.outputs import RequestOutput
from deploy.offline.own_rank import cut_off_by
from workers.engine.config import EngineConfig
from workers.engine.constraint import Matcher
from workers.engine.cost_model import CostModel
from workers.engine.engine import Engine
from workers.engine.errors import InvalidRequest, RankLost, ShoalError
from workers.engine.outputs import Load, TokenOutput
from workers.engine.plan import Executor, StepPlan
from workers.engine.request import EngineRequest


class Collector(Protocol):
    """Takes in what the engine says of one request."""

    request: RequestOutput

    def take(self, new: TokenOutput) -> bool:
        """Add new tokens; True if they are the last."""
        ...


class EngineLoop:
    """An engine on its executor, and who waits for its outputs. Threads take turns."""

    def __init__(self, config: EngineConfig, executor: Executor, cost: CostModel) -> None:
        """Begin idle; ``executor`` is closed by ``close``."""
        self.engine = Engine(config, cost)
        self.executor = executor
        self._config = config
        self._cost = cost
        self._collectors: dict[str, Collector] = {}
        self._is_closed = False
        self._lock = threading.RLock()  # a handler may come between taking it and saying whose it is
        self._owner: int | None = None
        """The thread whose turn it is."""
        self._interrupts = HeldInterrupts(None)
        self._loss: str | None = None

    @property
    def load(self) -> Load:
        """What the engine holds, and its counts since start."""
        return self.engine.load()

    def check_open(self) -> None:
        """Return if requests can still be run.

        Raises:
            InvalidRequest: the loop was closed.
            RankLost: the engine was left with half a step.
        """
        if self._is_closed:
            raise InvalidRequest("this LLM was closed and its ranks are gone: make another")
        if self._loss is not None:
            raise RankLost(self._loss)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until other threads' calls have ended, then add requests and run them; they are withdrawn on errors.

        Ctrl-C strikes where the engine and its ranks are whole, between two requests or steps; a second one at once.

        Raises:
            InvalidRequest: the loop was closed, or this thread is amid a turn: in a signal's handler.
        """
        if self._owner == threading.get_ident():
            raise InvalidRequest(
                "this LLM is at work in the same thread: wait for the call to end, or make another"
            )
        with self._lock:
            self.check_open()
            try:
                self._owner = threading.get_ident()
                with interrupts_held() as self._interrupts:
                    try:
                        yield
                    except BaseException:
                        self._withdraw()
                        raise
            finally:
                self._owner = None
                if self._is_closed:  # in a handler, or while another thread waits to do it
                    self.executor.close()

    def add(self, request: EngineRequest, collector: Collector, matcher: Matcher | None = None) -> None:
        """Take up a request; ``run`` tells ``collector`` what becomes of it. In a ``turn``."""
        self._collectors[request.request_id] = collector
        with self._undivided():
            # A request without earlier output cannot have ended yet, so nothing comes back.
            self.engine.add(request, time.monotonic(), matcher)
        self._interrupts.strike()

    def run(self, num_prompts: int, use_tqdm: bool) -> None:
        """Step until all requests have ended. In a ``turn``.

        Raises:
            InvalidRequest: the loop was closed meanwhile.
            ShoalError: the model's weights are broken, or a rank is lost.
        """
        engine, executor = self.engine, self.executor
        started_s, num_before = time.monotonic(), engine.num_output_tokens
        with tqdm(total=num_prompts, desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            told: Sequence[TokenOutput] = ()
            while self._collectors:
                # With all requests ended there is nothing to launch but a wait for copies to the host tier.
                while engine.has_requests and (plan := self._plan()) is not None:
                    executor.launch(plan)
                for token_output in told:  # not before: the ranks have their next plan now
                    if self._take(token_output) and use_tqdm:
                        num_tokens = engine.num_output_tokens - num_before
                        rate = num_tokens / (time.monotonic() - started_s)
                        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                        bar.update(1)
                told = self._collect() if engine.num_launched else ()
                self._interrupts.strike()
                if self._is_closed:
                    raise InvalidRequest("this LLM was closed amid a call")
        # Copies to the host tier go on.
        self._collect_launched()

    def restart(self, **fields: Any) -> None:
        """Begin anew with an empty engine on the same ranks; ``fields`` of ``EngineConfig`` differ."""
        with self.turn():
            assert not self._collectors, "the engine is restarted between two runs"
            self._turn_until_idle()
            self.engine = Engine(replace(self._config, **fields), self._cost)

    def close(self) -> None:
        """Let the ranks go; a call that is at work in another thread ends with an error first. Safe to call twice."""
        self._is_closed = True
        if self._owner == threading.get_ident():
            return  # in a handler: what it has interrupted closes
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self.executor.close()
            finally:
                self._owner = None

    def _withdraw(self) -> None:
        """Leave the engine empty after a refused prompt or an interrupted run."""
        request_ids = list(self._collectors)
        self._collectors.clear()
        if self._loss is not None:
            return
        with self._undivided():
            for request_id in request_ids:
                self.engine.abort(request_id)
        with contextlib.suppress(RankLost):  # as whatever asks something of the ranks next will say, too
            self._collect_launched()

    def _turn_until_idle(self) -> None:
        """Wait for what is under way though no request is: copies between the tiers."""
        while self.engine.has_work:
            while (plan := self._plan()) is not None:
                self.executor.launch(plan)
            self._collect_launched()
            self._interrupts.strike()

    def _plan(self) -> StepPlan | None:
        with self._undivided():
            return self.engine.plan(time.monotonic())

    def _collect(self) -> Sequence[TokenOutput]:
        result = self.executor.collect()
        with self._undivided():
            return self.engine.apply(result, time.monotonic())

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """What leaves the engine of no use if it is cut off: by a second Ctrl-C, or by another signal's handler."""
        try:
            yield
        except ShoalError:
            raise
        except BaseException as error:
            self._loss = cut_off_by(error)
            raise

    def _collect_launched(self) -> None:
        while self.engine.num_launched:
            self._collect()

    def _take(self, token_output: TokenOutput) -> bool:
        """Hand an output to its collector; True if its prompt has all of its outputs now."""
        if token_output.error is not None and not token_output.is_user_error:
            raise ShoalError(token_output.error)
        request_id = token_output.request_id
        collector = self._collectors[request_id]
        if not collector.take(token_output):
            return False
        if token_output.finish_reason is None:  # a stop string was found: the engine does not know
            self.engine.abort(request_id)
        del self._collectors[request_id]
        return collector.request.finished
