"""One caller that asks for ten times its share, before replicas that serve in order of arrival: what others see.

In virtual time, with the router's own placement and line, and the real scheduler in the replicas. A step takes 8 ms,
0.1 ms a row and 1/15,000 s a prompt token. Four quiet callers ask for 15 % of the capacity each.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

from deploy.simulate.messages import SimulatedRequest
from deploy.simulate.replica import EngineReplica
from deploy.simulate.replica_model import ReplicaModel
from router.placement.candidate import Candidate
from router.placement.prefix_policy import PrefixPolicy
from router.placement.replica_view import ReplicaShape, ReplicaView
from router.tenancy.fair_line import FairLine
from router.trace_lines import TraceRequest

PROMPT, OUTPUT, SECONDS, NUM_REPLICAS = 1024, 32, 30.0, 3
QUIET = ("a", "b", "c", "d")
MODEL = ReplicaModel(
    kind="engine",
    prompt_tokens_per_s=15_000,
    base_s=0.008,
    per_sequence_s=0.0001,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    num_kv_tokens=65_536,
)
Arrivals = list[tuple[float, str]]


def arrivals(rates: dict[str, float]) -> Arrivals:
    """Poisson arrivals; each caller's are the same whatever the others do."""
    found: Arrivals = []
    for caller, rate in rates.items():
        rng, now_s = random.Random(caller), 0.0
        while (now_s := now_s + rng.expovariate(rate)) < SECONDS:
            found.append((now_s, caller))
    return sorted(found)


class World:
    """An ingress and its replicas."""

    def __init__(self, is_fair: bool) -> None:
        shape = ReplicaShape(16, MODEL.max_num_seqs, MODEL.max_num_batched_tokens, 65_536 // 16, 65_536)
        self.replicas = [EngineReplica(MODEL, 16) for _ in range(NUM_REPLICAS)]
        self.views = [ReplicaView(str(number), shape) for number in range(NUM_REPLICAS)]
        self.policy, self.line = PrefixPolicy(), FairLine[SimulatedRequest]()
        self.is_fair = is_fair
        self.callers: dict[str, str] = {}
        self.arrived_s: dict[str, float] = {}
        self.first_token_s: dict[str, list[float]] = {}
        self.ends: list[tuple[float, int]] = []
        self.num_ended = 0

    def arrive(self, number: int, caller: str, now_s: float) -> None:
        request = SimulatedRequest(number, TraceRequest(now_s, PROMPT, OUTPUT, []))
        self.callers[request.request_id], self.arrived_s[request.request_id] = caller, now_s
        self.line.see(caller, now_s)
        self.line.charge(caller, PROMPT, 0)
        if self.is_fair and (len(self.line) or not any(view.has_room for view in self.views)):
            self.line.join(caller, request)
        else:
            self._place(request, now_s)

    def step(self) -> float:
        """End the next step; when that is."""
        now_s, number = heappop(self.ends)
        replica, view = self.replicas[number], self.views[number]
        report = replica.advance()
        if replica.next_s is not None:
            heappush(self.ends, (replica.next_s, number))
        view.apply_load(report.load)
        for begun in report.begun:
            view.settle(begun.request_id)
            waited_s = now_s - self.arrived_s[begun.request_id]
            self.first_token_s.setdefault(self.callers[begun.request_id], []).append(waited_s)
        for request_id in report.ended:
            self.line.charge(self.callers[request_id], 0, OUTPUT)
            self.num_ended += 1
        while len(self.line) and any(view.has_room for view in self.views):
            self._place(self.line.pop(), now_s)
        return now_s

    def _place(self, request: SimulatedRequest, now_s: float) -> None:
        candidates = [Candidate(view, 0) for view in self.views]
        best = self.policy.rank(candidates, PROMPT, request.request_id.encode())[0].candidate
        best.view.book(request.request_id, PROMPT, [])
        number = self.views.index(best.view)
        was_idle = self.replicas[number].next_s is None
        self.replicas[number].submit(request, now_s)
        next_s = self.replicas[number].next_s
        if was_idle and next_s is not None:
            heappush(self.ends, (next_s, number))


def run(requests: Arrivals, is_fair: bool) -> tuple[float, float]:
    """99th percentile of the quiet callers' times to first token, and requests a second that ended."""
    world = World(is_fair)
    position = 0
    while True:
        arrives_s = requests[position][0] if position < len(requests) else SECONDS
        if world.ends and world.ends[0][0] <= arrives_s:
            world.step()
        elif position < len(requests):
            world.arrive(position, requests[position][1], arrives_s)
            position += 1
        else:
            break
    times = sorted(one for caller in QUIET for one in world.first_token_s.get(caller, []))
    return times[int(0.99 * (len(times) - 1))] if times else 0.0, world.num_ended / SECONDS


def test_quiet_callers_do_not_notice_one_at_ten_times_its_share() -> None:
    _, capacity = run(arrivals({"only": 40.0 * NUM_REPLICAS}), is_fair=False)  # saturated
    rates = dict.fromkeys(QUIET, 0.15 * capacity)
    held = arrivals({**rates, "noisy": 0.38 * capacity})
    flood = arrivals({**rates, "noisy": 3.8 * capacity})

    held_s, _ = run(held, is_fair=True)
    fair_s, fair_per_s = run(flood, is_fair=True)
    unfair_s, unfair_per_s = run(flood, is_fair=False)

    print(f"p99 {held_s:.3f} s at its share, {fair_s:.3f} s at ten times, {unfair_s:.3f} s without the line;")
    print(f"{fair_per_s:.2f} requests/s, {unfair_per_s:.2f} without the line, {capacity:.2f} alone")
    assert fair_s <= 1.2 * held_s
    assert fair_per_s >= 0.97 * unfair_per_s
    assert unfair_s > 5 * held_s  # the line is what does it
