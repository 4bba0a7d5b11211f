"""Rules that say how many replicas there should be, in virtual time, and the delay before fewer are believed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

from cluster.autoscaling import ReplicaDemand, ScaleTargets, wanted_replicas
from cluster.demand import DemandMeter
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import Load

CONTROL_PERIOD_S = 1.0
"""Between two decisions; replicas push their figures to Ray Serve as often."""


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """What an operator sets; seconds."""

    min_replicas: int = 1
    max_replicas: int = 16
    start_s: float = 30.0
    """From the decision until a new replica takes requests."""
    look_back_s: float = 5.0
    """Figures are means over so long."""
    down_delay_s: float = 60.0
    targets: ScaleTargets = field(default_factory=ScaleTargets)


@dataclass(frozen=True, slots=True)
class FleetState:
    """What a rule may look at: means over the look-back period."""

    demands: Sequence[ReplicaDemand]
    """Of open replicas."""
    num_waiting: float
    """Requests that wait, at replicas or for one."""
    num_requests: float
    """Requests that wait or run."""
    num_target: int


ScaleRule = Callable[[FleetState, ScaleSettings], float]


def by_work(state: FleetState, settings: ScaleSettings) -> float:
    """Shoal's own: ``cluster.autoscaling``."""
    return wanted_replicas(state.demands, settings.targets, state.num_target)


def by_requests(num_per_replica: float) -> ScaleRule:
    """Ray Serve's default: ongoing requests over a target for each replica (``target_ongoing_requests``)."""
    return lambda state, settings: state.num_requests / num_per_replica


def by_queue(num_per_replica: float) -> ScaleRule:
    """Kubernetes' formula on the length of the queue: replicas times queue a replica over its target."""

    def rule(state: FleetState, settings: ScaleSettings) -> float:
        ratio = state.num_waiting / max(1, len(state.demands)) / num_per_replica
        return state.num_target * ratio if ratio > 1 or ratio < 0.5 else state.num_target

    return rule


def read_rule(name: str) -> ScaleRule:
    """``work``, ``requests:N`` or ``queue:N``.

    Raises:
        InvalidRequest: it is none of them.
    """
    kind, _, number = name.partition(":")
    if kind == "work" and not number:
        return by_work
    makers = {"requests": by_requests, "queue": by_queue}
    try:
        per_replica = float(number)
    except ValueError:
        per_replica = math.nan
    if kind not in makers or not 0 < per_replica < math.inf:
        raise InvalidRequest(
            f"--autoscale has {name!r}: it must be work, requests:N or queue:N, such as requests:32",
            "autoscale",
        )
    return makers[kind](per_replica)


class Scaler:
    """One rule over time: figures averaged, shrinking held back, bounds kept."""

    def __init__(self, rule: ScaleRule, settings: ScaleSettings, max_num_seqs: int, block_size: int) -> None:
        self.settings = settings
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._rule = rule
        self._meters: dict[int, DemandMeter] = {}
        length = max(1, round(settings.look_back_s / CONTROL_PERIOD_S))
        self._demands: dict[int, deque[ReplicaDemand]] = {}
        self._waiting: deque[float] = deque(maxlen=length)
        self._requests: deque[float] = deque(maxlen=length)
        self._wishes: deque[tuple[float, int]] = deque()
        """Of the last ``down_delay_s``, with their times."""

    def decide(self, loads: dict[int, Load], num_held: int, num_target: int, now_s: float) -> int:
        """How many replicas there should be from now on.

        Args:
            loads: of open replicas, by place.
            num_held: requests that wait for any replica.
            num_target: open and starting ones.
            now_s: virtual time.
        """
        self._waiting.append(num_held + sum(load.num_waiting for load in loads.values()))
        self._requests.append(num_held + sum(load.num_waiting + load.num_running for load in loads.values()))
        state = FleetState(
            self._average(loads, now_s), _mean(self._waiting), _mean(self._requests), num_target
        )
        settings = self.settings
        wanted = math.ceil(self._rule(state, settings) - 1e-9)
        if not loads and num_held:
            wanted = max(1, num_target)
        wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
        if not self._wishes:
            self._wishes.append((now_s, num_target))
        self._wishes.append((now_s, wanted))
        # The highest wish of each delay counts, as Kubernetes' autoscaler has it: one low moment takes nothing away.
        while self._wishes[0][0] < now_s - settings.down_delay_s:
            self._wishes.popleft()
        if wanted > num_target:
            return wanted
        return min(num_target, max(wish for _, wish in self._wishes))

    def _average(self, loads: dict[int, Load], now_s: float) -> list[ReplicaDemand]:
        for place in self._meters.keys() - loads.keys():
            del self._meters[place], self._demands[place]
        for place, load in loads.items():
            if place not in self._meters:
                self._meters[place] = DemandMeter(load, now_s, self._max_num_seqs, self._block_size)
                self._demands[place] = deque(maxlen=self._waiting.maxlen)
            self._demands[place].append(self._meters[place].measure(load, now_s))
        return [_mean_demand(demands) for demands in self._demands.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_demand(demands: Sequence[ReplicaDemand]) -> ReplicaDemand:
    return ReplicaDemand(*(_mean(values) for values in zip(*map(astuple, demands), strict=True)))
