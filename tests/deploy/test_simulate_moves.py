"""The simulator's replicas die and come back, and queued requests move: the router's own decisions, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.commands import app
from deploy.simulate.fleet import Outage, read_outage
from deploy.simulate.replica_model import ReplicaModel
from deploy.simulate.simulation import Simulation, SimulationResult
from router.placement.policy import POLICIES
from router.trace import Trace
from router.trace_lines import TraceRequest
from workers.engine.errors import InvalidRequest

BLOCK_SIZE = 64
KINDS = ("engine", "fifo")


def request(
    number: int, arrival_s: float = 0.0, num_prompt: int = 15_000, num_output: int = 4
) -> TraceRequest:
    """A prompt that shares nothing; a second of work at 15,000 tokens a second."""
    hashes = [(number * 10**6 + i).to_bytes(16, "big") for i in range(num_prompt // BLOCK_SIZE)]
    return TraceRequest(arrival_s, num_prompt, num_output, hashes)


def play(
    *requests: TraceRequest,
    kind: str = "engine",
    replicas: int = 2,
    ingresses: int = 1,
    outages: tuple[Outage, ...] = (),
    moves: bool = True,
    policy: str = "prefix",
) -> SimulationResult:
    model = ReplicaModel.model_validate({"kind": kind, "num_kv_tokens": 200_000})
    trace = Trace(BLOCK_SIZE, requests)
    simulation = Simulation(
        trace, model, POLICIES[policy], replicas, ingresses, outages=outages, moves_queued=moves
    )
    result = simulation.run()
    for ingress in simulation.ingresses:
        ingress.check()
        assert not ingress.has_waiting
        assert all(view.num_booked == 0 for view in ingress.views)
    for record, asked in zip(result.records, requests, strict=True):
        assert record.first_token_s is not None
        assert asked.arrival_s < record.first_token_s <= record.end_s
    return result


def worst_ttft_s(result: SimulationResult) -> float:
    return max(record.ttft_s for record in result.records)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_joins_takes_requests_from_the_queues_of_the_others(kind: str) -> None:
    requests = [request(number) for number in range(8)]
    joins = (Outage(1, 0.0, 1.5),)

    staying, moving = (play(*requests, kind=kind, outages=joins, moves=moves) for moves in (False, True))

    assert worst_ttft_s(staying) > 8.0
    # Of eight seconds of work one and a half are done when there are two: three and a quarter are left to each.
    assert 4.75 < worst_ttft_s(moving) < 6.0
    assert 2 <= sum(record.num_moves for record in moving.records) <= 4
    assert {record.replica for record in moving.records} == {0, 1}
    assert not any(record.num_moves for record in staying.records)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_dies_and_returns_costs_no_request(kind: str) -> None:
    requests = [request(number, arrival_s=0.2 * number, num_output=40) for number in range(12)]
    dies = (Outage(0, 1.0, 4.0),)

    staying, moving = (play(*requests, kind=kind, outages=dies, moves=moves) for moves in (False, True))

    assert worst_ttft_s(moving) < worst_ttft_s(staying)
    assert any(record.num_moves for record in moving.records)


def test_requests_wait_while_all_replicas_are_gone() -> None:
    result = play(request(0), request(1, 2.0), replicas=2, outages=(Outage(0, 1.0, 5.0), Outage(1, 1.0, 6.0)))

    assert [round(record.first_token_s or 0.0) for record in result.records] == [6, 7]


def test_many_ingresses_do_not_all_run_to_the_one_that_joins() -> None:
    """What one ingress has sent there, the others see: all move on together no more than half of the work."""
    requests = [request(number, arrival_s=0.001 * number) for number in range(32)]
    joins = (Outage(1, 0.0, 2.0),)

    one, eight = (play(*requests, ingresses=number, outages=joins) for number in (1, 8))

    assert worst_ttft_s(eight) < 1.15 * worst_ttft_s(one)
    for result in (one, eight):
        assert max(record.num_moves for record in result.records) == 1


def test_other_policies_leave_requests_where_they_put_them() -> None:
    requests = [request(number) for number in range(8)]

    result = play(*requests, policy="round-robin", outages=(Outage(1, 0.0, 1.5),))

    assert not any(record.num_moves for record in result.records)


@given(
    times=st.lists(st.floats(0.0, 6.0), min_size=1, max_size=14),
    sizes=st.lists(st.integers(10, 20_000), min_size=14, max_size=14),
    outages=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.1, 5.0), st.floats(0.1, 3.0)),
        max_size=3,
        unique_by=lambda o: o[0],
    ),
    kind=st.sampled_from(KINDS),
    ingresses=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_whatever_dies_and_moves_each_request_is_served_to_its_end(
    times, sizes, outages, kind, ingresses
) -> None:
    requests = [
        request(number, time_s, size, num_output=1 + size % 50)
        for number, (time_s, size) in enumerate(zip(sorted(times), sizes, strict=False))
    ]
    away = tuple(Outage(place, from_s, from_s + length_s) for place, from_s, length_s in outages)

    play(*requests, kind=kind, replicas=3, ingresses=ingresses, outages=away)


@pytest.mark.parametrize("text", ["3", "3:5", "9:1-2", "1:5-5", "1:7-6", "x:1-2", "1:-1-2"])
def test_an_outage_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--outage has"):
        read_outage(text, num_places=4)


def test_the_command_compares_moving_and_staying(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 15000, "output_length": 4, "hash_ids": {}}}\n'
    trace.write_text("".join(line.format(n, list(range(100 * n, 100 * n + 30))) for n in range(8)))
    command = ["simulate", str(trace), "--replicas", "2", "--outage", "1:0-1.5"]

    both = CliRunner().invoke(app, [*command, "--move", "both"])
    clash = CliRunner().invoke(app, [*command, "--autoscale", "work"])

    assert both.exit_code == 0, both.output
    assert "staying" in both.output
    assert "moving" in both.output
    assert isinstance(clash.exception, InvalidRequest) or "--outage goes with" in clash.output
