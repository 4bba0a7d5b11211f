"""Replicas that come and go in virtual time."""

from __future__ import annotations

import pytest

from deploy.simulate.fleet import Fleet, Phase
from deploy.simulate.replica_model import ReplicaModel
from deploy.simulate.scaling import Scaler, ScaleSettings, read_rule
from deploy.simulate.simulation import Simulation, SimulationResult
from router.placement.policy import POLICIES
from router.trace import Trace
from router.trace_lines import TraceRequest
from workers.engine.errors import InvalidRequest

MODEL = ReplicaModel(kind="fifo", prompt_tokens_per_s=1000, num_kv_tokens=65536)
SETTINGS = ScaleSettings(max_replicas=6, start_s=10.0, down_delay_s=20.0)


def burst(per_s: float, start_s: float, end_s: float) -> list[TraceRequest]:
    """Requests of 200 tokens, a fifth of a second of work each."""
    count = int((end_s - start_s) * per_s)
    return [TraceRequest(start_s + number / per_s, 200, 4, []) for number in range(count)]


def play(
    requests: list[TraceRequest], rule: str = "work", settings: ScaleSettings = SETTINGS
) -> SimulationResult:
    scaler = Scaler(read_rule(rule), settings, MODEL.max_num_seqs, 16)
    simulation = Simulation(Trace(16, requests), MODEL, POLICIES["prefix"], 1, scaler=scaler)
    result = simulation.run()
    for ingress in simulation.ingresses:
        ingress.check()
    return result


def test_places_start_open_drain_and_are_used_again() -> None:
    fleet = Fleet(num_places=3, num_open=1, start_s=5.0)

    fleet.scale_to(3, 10.0)
    assert fleet.phases == [Phase.OPEN, Phase.STARTING, Phase.STARTING]
    assert fleet.advance(15.0, lambda place: True) == [1, 2]
    fleet.scale_to(1, 20.0)
    assert fleet.phases == [Phase.OPEN, Phase.DRAINING, Phase.DRAINING]
    fleet.advance(21.0, lambda place: place == 1)
    assert fleet.phases == [Phase.OPEN, Phase.OFF, Phase.DRAINING]
    fleet.scale_to(2, 21.0)
    assert fleet.phases == [Phase.OPEN, Phase.STARTING, Phase.DRAINING]


def test_a_replica_costs_from_its_start_to_the_end_of_its_drain() -> None:
    fleet = Fleet(num_places=2, num_open=1, start_s=5.0)

    fleet.scale_to(2, 0.0)
    for second in (5.0, 10.0):
        fleet.advance(second, lambda place: False)
    fleet.scale_to(1, 10.0)
    fleet.advance(12.0, lambda place: True)
    fleet.advance(20.0, lambda place: True)

    assert fleet.replica_s == 20.0 + 12.0


def test_what_has_not_started_is_given_up_first() -> None:
    fleet = Fleet(num_places=3, num_open=2, start_s=5.0)
    fleet.scale_to(3, 0.0)

    fleet.scale_to(2, 1.0)

    assert fleet.phases == [Phase.OPEN, Phase.OPEN, Phase.OFF]


def test_a_step_in_load_is_answered_within_ten_seconds_and_given_back_later() -> None:
    quiet, busy = burst(1, 0, 100), burst(12, 100, 300)  # 0.2 and 2.4 replicas' work

    result = play(quiet + busy + burst(1, 300, 600))

    by_time = {sample.time_s: sample.num_replicas for sample in result.samples}
    assert {count for time_s, count in by_time.items() if time_s < 100} == {1}
    assert (
        max(count for time_s, count in by_time.items() if time_s < 122) >= 3
    )  # decided by 110, there by 120
    assert by_time[max(by_time)] == 1
    assert all(one.first_token_s is not None for one in result.records)
    late = [one for one in result.records if 150 < one.arrival_s < 300]
    assert sum(one.ttft_s < SETTINGS.targets.ttft_s for one in late) / len(late) > 0.99


def test_requests_are_held_while_there_is_no_replica() -> None:
    settings = ScaleSettings(min_replicas=0, max_replicas=2, start_s=10.0, down_delay_s=20.0)

    result = play([*burst(1, 0, 5), *burst(1, 100, 105)], settings=settings)

    first_after = result.records[5]
    assert first_after.arrival_s == 100
    assert 10 < first_after.ttft_s < 13
    assert result.replica_s < 100


@pytest.mark.parametrize("rule", ["requests:8", "queue:4"])
def test_other_rules_serve_everything_as_well(rule: str) -> None:
    result = play(burst(12, 0, 60), rule)

    assert all(one.first_token_s is not None for one in result.records)
    assert max(sample.num_replicas for sample in result.samples) > 1


@pytest.mark.parametrize("name", ["magic", "requests", "requests:0", "queue:x", "work:3"])
def test_an_unknown_rule_names_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidRequest, match="work, requests:N or queue:N"):
        read_rule(name)
