"""The event loop: arrivals and ends of steps, in the order of virtual time.

Nothing waits and nothing is random: one trace and one set of settings give one result, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf

from deploy.simulate.fleet import Fleet, Outage, Phase
from deploy.simulate.ingress import SimulatedIngress
from deploy.simulate.messages import Report, SimulatedRequest
from deploy.simulate.replica import SimulatedReplica, make_replica
from deploy.simulate.replica_model import ReplicaModel
from deploy.simulate.scaling import CONTROL_PERIOD_S, Scaler
from router.placement.moving import PERIOD_S, Move
from router.placement.policy import Policy
from router.placement.replica_view import ReplicaShape
from router.trace import Trace
from workers.engine.errors import UserError

COMING_S = 0.002
"""From a request's arrival until other ingresses know which replica has it: two messages."""
NUM_SAMPLES = 240
"""Points in time at which loads are noted, over the span of the arrivals."""


@dataclass(slots=True)
class RequestRecord:
    """The story of one request; times are virtual seconds."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    replica: int
    num_predicted_hit_tokens: int
    predicted_ttft_s: float
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    """Of those, brought back from host memory."""
    first_token_s: float | None = None
    """None: it was refused, as it can never fit."""
    end_s: float = 0.0
    num_moves: int = 0
    """Queues that it left for another."""

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        assert self.first_token_s is not None, "a refused request has no first token"
        return self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What replicas had to do at one moment, by their last reports."""

    time_s: float
    num_queued_tokens: list[int]
    num_running: list[int]
    num_replicas: int
    """That take requests."""


@dataclass(slots=True)
class SimulationResult:
    """All that happened."""

    records: list[RequestRecord]
    samples: list[LoadSample] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    end_s: float = 0.0
    replica_s: float = 0.0
    """Seconds of replicas, those that start or drain included."""


class Simulation:
    """Replicas, ingresses and the clock between them."""

    def __init__(
        self,
        trace: Trace,
        model: ReplicaModel,
        make_policy: Callable[[], Policy],
        num_replicas: int,
        num_ingresses: int = 1,
        scaler: Scaler | None = None,
        outages: Sequence[Outage] = (),
        moves_queued: bool = True,
    ) -> None:
        """``num_replicas`` are there from the beginning to the end, unless a ``scaler`` or an outage says otherwise.

        ``moves_queued`` lets requests change queues where the policy does.
        """
        num_places = scaler.settings.max_replicas if scaler is not None else num_replicas
        shape = ReplicaShape(
            block_size=trace.block_size,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            num_blocks=model.num_blocks(trace.block_size),
            max_model_len=model.num_kv_tokens,
        )
        self.replicas: list[SimulatedReplica] = [
            make_replica(model, trace.block_size) for _ in range(num_places)
        ]
        self.ingresses = [SimulatedIngress(make_policy(), shape, num_places) for _ in range(num_ingresses)]
        self._moves_queued = moves_queued and self.ingresses[0].policy.costs_s is not None
        self._look_s = inf
        """When ingresses look at queues next."""
        self._changes = deque(sorted((c for one in outages for c in one.changes), key=lambda c: c.time_s))
        self._model = model
        self._scaler = scaler
        self._fleet = Fleet(num_places, num_replicas, scaler.settings.start_s if scaler is not None else 0.0)
        self._coming: deque[tuple[float, int, SimulatedRequest]] = deque()
        """Of requests that were taken up, when the other ingresses hear of it, and where they are."""
        self._control_s = 0.0
        """When the scaler decides next."""
        self._held: deque[SimulatedRequest] = deque()
        """Requests that wait for any replica."""
        self._records: dict[int, RequestRecord] = {}
        self._at: list[dict[str, SimulatedRequest]] = [{} for _ in range(num_places)]
        """Requests that are at each replica."""
        self._sums = [0, 0]
        """Steps and preemptions of replicas that have gone."""
        self._trace = trace
        self._ends: list[tuple[float, int]] = []
        """Ends of the steps that run now, by time and replica: a heap."""
        self._loads = [view.load for view in self.ingresses[0].views]
        self._result = SimulationResult([])

    def run(self) -> SimulationResult:
        """Play the trace to the last token."""
        result = self._result
        interval_s = self._trace.span_s / NUM_SAMPLES
        self._set_open()
        for number, traced in enumerate(self._trace.requests):
            self._pass_time(traced.arrival_s)
            if not result.samples or traced.arrival_s >= result.samples[-1].time_s + interval_s:
                self._sample(traced.arrival_s)
            self._arrive(SimulatedRequest(number, traced), traced.arrival_s)
        while self._changes:
            self._pass_time(self._changes[0].time_s)
        while self._held:  # replicas are on their way
            self._pass_time(self._control_s)
        self._run_until(None)
        self._fleet.advance(max(result.end_s, self._trace.span_s), lambda place: False)
        result.records = [self._records[number] for number in range(len(self._records))]
        result.replica_s = self._fleet.replica_s
        result.num_steps = self._sums[0] + sum(load.num_steps for load in self._loads)
        result.num_preemptions = self._sums[1] + sum(load.num_preemptions for load in self._loads)
        return result

    def _pass_time(self, time_s: float) -> None:
        """Run steps, and what happens to the fleet between them, until ``time_s``."""
        while self._changes and self._changes[0].time_s <= time_s:
            change = self._changes.popleft()
            self._pass_time(change.time_s)
            self._fleet.advance(change.time_s, lambda place: False)
            if change.is_loss:
                self._lose(change.place, change.time_s)
            else:
                self._return(change.place, change.time_s)
        while self._scaler is not None and self._control_s <= time_s:
            self._run_until(self._control_s)
            self._scale(self._scaler, self._control_s)
            self._control_s += CONTROL_PERIOD_S
        self._run_until(time_s)

    def _scale(self, scaler: Scaler, now_s: float) -> None:
        fleet = self._fleet
        opened = fleet.advance(now_s, lambda place: self.replicas[place].next_s is None)
        for place in opened:
            self._renew(place)
        loads = {place: self._loads[place] for place, phase in enumerate(fleet.phases) if phase is Phase.OPEN}
        fleet.scale_to(scaler.decide(loads, len(self._held), fleet.num_target, now_s), now_s)
        self._set_open()
        self._admit_held(now_s)

    def _admit_held(self, now_s: float) -> None:
        if self._fleet.num_open:
            held, self._held = self._held, deque()
            for request in held:
                self._arrive(request, now_s)

    def _renew(self, place: int) -> None:
        """A new replica stands in this place: nothing is cached, and its counters begin at zero."""
        gone = self._loads[place]
        self._sums[0] += gone.num_steps
        self._sums[1] += gone.num_preemptions
        self.replicas[place] = make_replica(self._model, self._trace.block_size)
        for ingress in self.ingresses:
            ingress.renew(place)
        self._loads[place] = self.ingresses[0].views[place].load

    def _set_open(self) -> None:
        for ingress in self.ingresses:
            ingress.wake()
            for view, phase in zip(ingress.views, self._fleet.phases, strict=True):
                view.is_open = phase is Phase.OPEN

    def _run_until(self, time_s: float | None) -> None:
        """End all steps that end before ``time_s``, or all there are."""
        ends, limit_s = self._ends, inf if time_s is None else time_s
        while (ends and ends[0][0] <= limit_s) or self._look_s <= limit_s < inf:
            if self._look_s <= (ends[0][0] if ends else inf):
                self._look(self._look_s)
                continue
            now_s, number = heappop(ends)
            replica = self.replicas[number]
            report = replica.advance()
            if replica.next_s is not None:
                heappush(ends, (replica.next_s, number))
            self._hear(number, report, now_s)

    def _arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """One ingress after the other takes a request, as behind a load balancer."""
        if not self._fleet.num_open:
            self._held.append(request)
            return
        traced = request.traced
        self._tell_coming(now_s)
        placement = self._ingress_of(request).place(request, now_s)
        if request.number not in self._records:
            self._records[request.number] = RequestRecord(
                traced.arrival_s,
                traced.num_prompt_tokens,
                max(1, traced.num_output_tokens),
                placement.replica,
                placement.num_hit_tokens,
                now_s - traced.arrival_s + placement.forecast.start_s,
            )
        self._send(request, placement.replica, now_s)

    def _send(self, request: SimulatedRequest, place: int, now_s: float) -> None:
        replica = self.replicas[place]
        was_idle = replica.next_s is None
        self._records[request.number].replica = place
        try:
            replica.submit(request, now_s)
        except UserError:
            self._ingress_of(request).drop(place, request)
            return
        self._at[place][request.request_id] = request
        self._coming.append((now_s + COMING_S, place, request))
        if was_idle and replica.next_s is not None:
            heappush(self._ends, (replica.next_s, place))
        if self._moves_queued and self._look_s == inf:
            self._look_s = now_s + PERIOD_S

    # Queued requests that move; messages between ingress and replica take no time

    def _look(self, now_s: float) -> None:
        waits = any(ingress.has_waiting for ingress in self.ingresses)
        self._look_s = now_s + PERIOD_S if waits else inf
        for ingress in self.ingresses:
            for place, least_wait_s in ingress.sources(now_s):
                for move in ingress.choose(place, self.replicas[place].queued(least_wait_s)):
                    self._move(ingress, place, move, now_s)

    def _move(self, ingress: SimulatedIngress, place: int, move: Move, now_s: float) -> None:
        report = self.replicas[place].release(move.request_id)
        if report is None:
            ingress.cancel(move)
            return
        request, placement = ingress.move(move, now_s)
        del self._at[place][request.request_id]
        for other in self.ingresses:
            if other is not ingress:
                other.hear_gone(place, request)
        self._hear(place, report, now_s)
        record = self._records[request.number]
        record.num_moves += 1
        record.num_predicted_hit_tokens = placement.num_hit_tokens
        record.predicted_ttft_s = now_s - record.arrival_s + placement.forecast.start_s
        self._send(request, placement.replica, now_s)

    # Replicas that die and come back

    def _lose(self, place: int, now_s: float) -> None:
        """A replica is gone at once; its requests go on elsewhere, with the tokens that they have."""
        self._fleet.lose(place)
        self._set_open()
        self._ends = [end for end in self._ends if end[1] != place]
        heapify(self._ends)
        requests, self._at[place] = self._at[place], {}
        for request_id, num_generated in self.replicas[place].abandon().items():
            request = requests[request_id]
            self._ingress_of(request).drop(place, request)
            traced = request.traced
            rest = replace(
                traced,
                num_prompt_tokens=traced.num_prompt_tokens + num_generated,
                num_output_tokens=max(1, traced.num_output_tokens) - num_generated,
            )
            self._arrive(SimulatedRequest(request.number, rest), now_s)

    def _return(self, place: int, now_s: float) -> None:
        self._fleet.restore(place)
        self._renew(place)
        self._set_open()
        self._admit_held(now_s)

    def _ingress_of(self, request: SimulatedRequest) -> SimulatedIngress:
        return self.ingresses[request.number % len(self.ingresses)]

    def _tell_coming(self, now_s: float) -> None:
        while self._coming and self._coming[0][0] <= now_s:
            _, replica, request = self._coming.popleft()
            record = self._records[request.number]
            if record.first_token_s is not None or record.replica != replica:
                continue  # it is no longer on its way
            for ingress in self.ingresses:
                if ingress is not self._ingress_of(request):
                    ingress.hear_coming(replica, request)

    def _hear(self, number: int, report: Report, now_s: float) -> None:
        for ingress in self.ingresses:
            ingress.hear(number, report, now_s)
        self._loads[number] = report.load
        records = self._records
        for begun in report.begun:
            record = records[int(begun.request_id)]
            if record.first_token_s is not None:
                continue  # it goes on after a loss
            record.first_token_s = now_s
            record.num_cached_tokens = begun.num_cached_tokens
            record.num_host_cached_tokens = begun.num_host_cached_tokens
        for request_id in report.ended:
            records[int(request_id)].end_s = now_s
            del self._at[number][request_id]
        self._result.end_s = now_s

    def _sample(self, time_s: float) -> None:
        loads = self._loads
        self._result.samples.append(
            LoadSample(
                time_s,
                [load.num_queued_tokens for load in loads],
                [load.num_running for load in loads],
                self._fleet.num_open,
            )
        )
