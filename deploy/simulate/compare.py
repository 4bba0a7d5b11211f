"""One trace under several policies and rules of scaling: what ``shoal simulate`` runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from deploy.simulate.fleet import Outage
from deploy.simulate.page import Run
from deploy.simulate.replica_model import ReplicaModel
from deploy.simulate.scaling import Scaler, ScaleSettings, read_rule
from deploy.simulate.simulation import Simulation
from deploy.simulate.summary import curves, summarize
from router.placement.policy import POLICIES
from router.trace import Trace
from workers.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and on what."""

    trace: Trace
    model: ReplicaModel
    policies: Sequence[str]
    rules: Sequence[str]
    """Of scaling; none: ``num_replicas`` are there all the time."""
    scale: ScaleSettings
    num_replicas: int
    num_ingresses: int
    outages: Sequence[Outage] = ()
    moves: Sequence[bool] = (True,)
    """Whether queued requests may move; both: with and without."""

    def check(self) -> None:
        """Look everything up before a long run.

        Raises:
            InvalidRequest: a policy or a rule is unknown, the trace is empty, or options exclude each other.
        """
        if self.rules and self.outages:
            raise InvalidRequest(
                "--outage goes with a fixed number of replicas: leave out --autoscale", "outage"
            )
        for name in self.policies:
            if name not in POLICIES:
                raise InvalidRequest(
                    f"--policy is {name!r}: it must be one of {', '.join(POLICIES)}", "policy"
                )
        for rule in self.rules:
            read_rule(rule)
        if not self.trace.requests:
            raise InvalidRequest("the trace has no requests", "trace")

    def run(self) -> Iterator[tuple[dict[str, Any], Run]]:
        """Play the trace once for each combination; figures for a file, curves for a page."""
        rules: Sequence[str | None] = self.rules or [None]
        for policy, rule, moves in product(self.policies, rules, self.moves):
            yield self._run_one(policy, rule, moves)

    def _run_one(self, policy: str, rule: str | None, moves: bool) -> tuple[dict[str, Any], Run]:
        scaler, num_places = None, self.num_replicas
        if rule is not None:
            scaler = Scaler(read_rule(rule), self.scale, self.model.max_num_seqs, self.trace.block_size)
            num_places = self.scale.max_replicas
        started_s = time.process_time()
        result = Simulation(
            self.trace,
            self.model,
            POLICIES[policy],
            self.num_replicas,
            self.num_ingresses,
            scaler,
            self.outages,
            moves,
        ).run()
        cpu_s = round(time.process_time() - started_s, 1)
        name = policy if rule is None else rule if len(self.policies) == 1 else f"{policy}, {rule}"
        if len(self.moves) > 1:
            name += ", moving" if moves else ", staying"
        run = Run(name, summarize(result, num_places, self.scale.targets), curves(result, num_places))
        figures = {
            "policy": policy,
            "autoscale": rule,
            "moves": moves,
            "name": name,
            **asdict(run.summary),
            "cpu_s": cpu_s,
        }
        return figures, run
