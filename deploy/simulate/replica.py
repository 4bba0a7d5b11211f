"""Replicas in virtual time: requests in, reports out, steps that take what the cost model says.

``EngineReplica`` is the engine that serves models, ``workers.engine.engine.Engine``, with a cost model in the
place of its ranks. It reports when the brain process does: after each step.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from deploy.simulate.copy_links import CopyLinks
from deploy.simulate.fifo_replica import FifoReplica
from deploy.simulate.messages import Begun, Report, SimulatedRequest
from deploy.simulate.replica_model import ReplicaModel
from workers.engine.cost_model import attended
from workers.engine.engine import Engine
from workers.engine.outputs import Queued
from workers.engine.plan import StepPlan, StepResult
from workers.engine.request import ChoiceParams, EngineRequest


class SimulatedReplica(Protocol):
    """Runs one step after another; time passes only as it is told."""

    @property
    def next_s(self) -> float | None:
        """When the step that runs now ends; None while it is idle."""
        ...

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Take up a request.

        Raises:
            UserError: it can never be served; nothing has changed.
        """
        ...

    def advance(self) -> Report:
        """End the step that runs now and begin the next."""
        ...

    def queued(self, least_wait_s: float) -> list[Queued]:
        """Requests in line that have not begun, as ``workers.engine.engine.Engine`` tells of them."""
        ...

    def release(self, request_id: str) -> Report | None:
        """Give a request back that has not begun; None: it has."""
        ...

    def abandon(self) -> dict[str, int]:
        """Die: requests that were here, and how many tokens each had; nothing more is reported."""
        ...


def make_replica(model: ReplicaModel, block_size: int) -> SimulatedReplica:
    """A replica as ``model`` has it."""
    if model.kind == "fifo":
        return FifoReplica(model, block_size)
    return EngineReplica(model, block_size)


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    start_s: float
    end_s: float


class EngineReplica:
    """The real engine; each launched plan takes its time after the one before it."""

    def __init__(self, model: ReplicaModel, block_size: int) -> None:
        self._cost = model.cost(block_size)
        self.engine = Engine(model.engine_config(block_size), self._cost)
        self._links = CopyLinks(self._cost)
        self._steps: deque[_Step] = deque()
        self._num_generated: Counter[str] = Counter()
        """Tokens of each request that is here."""
        self._free_s = 0.0
        """When the last launched step ends."""

    @property
    def next_s(self) -> float | None:
        """When the oldest launched step ends; None while none is launched."""
        return self._steps[0].end_s if self._steps else None

    def submit(self, request: SimulatedRequest, now_s: float) -> None:
        """Take up a request, and plan at once if fewer steps are launched than may be."""
        traced = request.traced
        self.engine.add(
            EngineRequest(
                request_id=request.request_id,
                # Tokens only have to differ where no hash says that they are equal.
                prompt_token_ids=[request.number] * traced.num_prompt_tokens,
                params=ChoiceParams(max_tokens=max(1, traced.num_output_tokens), ignore_eos=True),
                block_hashes=list(traced.hashes),
                arrival_s=now_s,
            ),
            now_s,
        )
        self._num_generated[request.request_id] = 0
        self._launch(now_s)

    def advance(self) -> Report:
        """Apply the oldest step's result and launch what follows."""
        step = self._steps.popleft()
        plan = step.plan
        copies = self._links.end(plan.step_id, step.end_s)
        result = StepResult(
            plan.step_id,
            [0] * len(plan.sampled_positions),
            elapsed_s=step.end_s - step.start_s,
            copied=copies.copied,
            num_copied_blocks=copies.num_blocks,
            copied_s=copies.copied_s,
        )
        outputs = self.engine.apply(result, step.end_s)
        self._launch(step.end_s)
        self._num_generated.update(output.request_id for output in outputs)
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        for request_id in ended:
            del self._num_generated[request_id]
        return self._report(
            begun=[
                Begun(output.request_id, output.num_cached_tokens, output.num_host_cached_tokens)
                for output in outputs
                if output.num_cached_tokens is not None
            ],
            ended=ended,
        )

    def queued(self, least_wait_s: float) -> list[Queued]:
        """See ``SimulatedReplica``."""
        return self.engine.queued(least_wait_s=least_wait_s)

    def release(self, request_id: str) -> Report | None:
        """See ``SimulatedReplica``."""
        if not self.engine.release(request_id):
            return None
        del self._num_generated[request_id]
        return self._report([], [])

    def abandon(self) -> dict[str, int]:
        """See ``SimulatedReplica``."""
        self._steps.clear()
        return dict(self._num_generated)

    def _report(self, begun: list[Begun], ended: list[str]) -> Report:
        return Report(self.engine.load(), self.engine.drain_cache_events(), begun, ended)

    def _launch(self, now_s: float) -> None:
        while (plan := self.engine.plan(now_s)) is not None:
            start_s = max(now_s, self._free_s)
            self._links.begin(plan, start_s)
            self._free_s = self._end_s(plan, start_s)
            self._steps.append(_Step(plan, start_s, self._free_s))

    def _end_s(self, plan: StepPlan, start_s: float) -> float:
        """When a plan's step ends; one without rows takes no time, or lasts until all copies are done.

        Decodes come first in a plan: one token each, of a row that samples.
        """
        if plan.awaits_copies:
            return max(start_s, self._links.done_s)
        if not plan.rows:
            return start_s
        num_decodes = 0
        for num_tokens, samples in zip(plan.num_tokens, plan.samples, strict=True):
            if num_tokens != 1 or not samples:
                break
            num_decodes += 1
        num_prefill = sum(plan.num_tokens[num_decodes:])
        num_attended = sum(map(attended, plan.num_tokens[num_decodes:], plan.starts[num_decodes:]))
        num_context = sum(plan.starts[:num_decodes])
        return start_s + self._cost.step_s(num_decodes, num_prefill, num_context, num_attended)
