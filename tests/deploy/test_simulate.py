"""The simulator: the real parts, in virtual time, with answers that can be worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.commands import app
from deploy.simulate.page import Run, render_page
from deploy.simulate.replica import EngineReplica
from deploy.simulate.replica_model import ReplicaModel
from deploy.simulate.simulation import Simulation, SimulationResult
from deploy.simulate.summary import curves, summarize
from router.placement.policy import POLICIES, PrefixPolicy
from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import ReplicaView
from router.trace import Trace
from router.trace_lines import TraceRequest
from workers.engine.engine import Engine
from workers.engine.errors import InvalidRequest

KINDS = ("engine", "fifo")
BLOCK_SIZE = 64
STEP_S, PER_SEQUENCE_S, PER_TOKEN_S = 0.008, 0.0001, 1 / 15_000


def make_model(kind: str = "engine", **fields: object) -> ReplicaModel:
    return ReplicaModel.model_validate({"kind": kind, "run_ahead": 0, "num_kv_tokens": 64_000, **fields})


def request(
    arrival_s: float = 0.0,
    num_prompt: int = 1000,
    num_output: int = 1,
    *,
    chain: int = 0,
    shared: int | None = None,
) -> TraceRequest:
    """A prompt whose blocks are those of ``chain``, or only the first ``shared`` of them and the rest its own."""
    num_blocks = num_prompt // BLOCK_SIZE
    own = hash((arrival_s, num_prompt, num_output)) % 10**9
    hashes = [
        ((chain + 1) * 10**6 + i if shared is None or i < shared else 10**18 + own * 10**6 + i).to_bytes(
            16, "big"
        )
        for i in range(num_blocks)
    ]
    return TraceRequest(arrival_s, num_prompt, num_output, hashes)


def play(
    *requests: TraceRequest,
    kind: str = "engine",
    policy: str = "prefix",
    replicas: int = 1,
    ingresses: int = 1,
    **fields: object,
) -> SimulationResult:
    trace = Trace(BLOCK_SIZE, requests)
    simulation = Simulation(trace, make_model(kind, **fields), POLICIES[policy], replicas, ingresses)
    result = simulation.run()
    for ingress in simulation.ingresses:
        ingress.check()
        assert all(view.num_booked == 0 for view in ingress.views)
    for replica in simulation.replicas:
        assert replica.next_s is None
        if isinstance(replica, EngineReplica):
            replica.engine.check()
    return result


def bursts(
    num_bursts: int, gap_s: float, num_siblings: int = 8, within_s: float = 0.002
) -> list[TraceRequest]:
    requests = [
        request(burst * gap_s + sibling * within_s, 4359, 20, chain=burst, shared=64)
        for burst in range(num_bursts)
        for sibling in range(num_siblings)
    ]
    return sorted(requests, key=lambda one: one.arrival_s)


# What happens, by hand


@pytest.mark.parametrize("kind", KINDS)
def test_one_prompt_takes_its_chunks_and_its_steps(kind: str) -> None:
    (record,) = play(request(5.0, num_prompt=3000, num_output=11), kind=kind).records

    assert record.ttft_s == pytest.approx(2 * STEP_S + 3000 * PER_TOKEN_S)
    assert record.end_s - record.first_token_s == pytest.approx(10 * (STEP_S + PER_SEQUENCE_S))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_seen_before_is_computed_from_its_first_new_block(kind: str) -> None:
    first, second = play(request(), request(9.0, num_prompt=1100), kind=kind).records

    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 15 * BLOCK_SIZE)
    assert second.num_predicted_hit_tokens == second.num_cached_tokens
    assert second.ttft_s == pytest.approx(STEP_S + 140 * PER_TOKEN_S)


def test_what_a_prompt_token_reads_costs_time_and_is_foreseen() -> None:
    _, record = play(request(num_prompt=10), request(9.0, 3000), per_attended_s=1e-8).records

    attended_s = 1e-8 * 3000**2 / 2
    assert record.ttft_s == pytest.approx(2 * STEP_S + 3000 * PER_TOKEN_S + attended_s)
    assert record.predicted_ttft_s == pytest.approx(record.ttft_s, rel=1e-3)


def test_blocks_come_back_from_host_memory_in_the_time_foreseen() -> None:
    others = [request(1.0 + number, 2000, chain=number) for number in range(1, 4)]
    *_, record = play(
        request(), *others, request(9.0), num_kv_tokens=64 * 64, num_host_kv_tokens=64_000
    ).records  # 64 blocks: the others take what the first one left

    assert record.num_cached_tokens == record.num_host_cached_tokens == 15 * BLOCK_SIZE
    assert record.num_predicted_hit_tokens == record.num_cached_tokens
    copy_s = 20e-6 + 15 * BLOCK_SIZE / 390_000
    assert record.ttft_s == pytest.approx(copy_s + STEP_S + 40 * PER_TOKEN_S)
    assert record.predicted_ttft_s == pytest.approx(record.ttft_s, rel=1e-3)


def test_blocks_that_are_slower_to_copy_than_to_compute_are_computed_as_foreseen() -> None:
    others = [request(1.0 + number, 2000, chain=number) for number in range(1, 4)]
    *_, record = play(
        request(),
        *others,
        request(9.0),
        num_kv_tokens=64 * 64,
        num_host_kv_tokens=64_000,
        copied_tokens_per_s=1000,
    ).records

    assert record.num_cached_tokens == 0
    assert record.predicted_ttft_s == pytest.approx(record.ttft_s, rel=1e-3)


def test_the_fifo_replica_prefills_one_prompt_after_the_other() -> None:
    first, second = play(request(chain=1), request(0.01, num_prompt=1000, chain=2), kind="fifo").records

    step_s = STEP_S + 1000 * PER_TOKEN_S
    assert first.ttft_s == pytest.approx(step_s)
    assert second.ttft_s == pytest.approx(2 * step_s - 0.01)


def test_the_engine_packs_two_prompts_into_one_step() -> None:
    _, second, third = play(
        request(), request(0.01, num_prompt=1000, chain=2), request(0.02, num_prompt=900, chain=3)
    ).records

    assert second.first_token_s == third.first_token_s
    assert second.first_token_s == pytest.approx(2 * STEP_S + 2900 * PER_TOKEN_S)


def test_the_fifo_replica_reserves_room_for_the_answer() -> None:
    """Two requests of 48 blocks do not fit 64: the second waits until the first has ended."""
    long = {"num_prompt": 2048, "num_output": 1024}
    first, second = play(
        request(**long, chain=1), request(0.001, **long, chain=2), kind="fifo", num_kv_tokens=64 * 64
    ).records

    assert second.first_token_s > first.end_s


def test_launching_ahead_costs_a_request_the_step_under_way() -> None:
    requests = [request(num_output=500), request(1.0, num_prompt=640, chain=2)]

    waited = [play(*requests, run_ahead=ahead).records[1].ttft_s for ahead in (0, 1)]

    assert waited[1] - waited[0] == pytest.approx(STEP_S + PER_SEQUENCE_S, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_can_never_fit_is_refused_and_the_rest_is_served(kind: str) -> None:
    result = play(request(num_prompt=70_000), request(1.0), kind=kind)

    assert [record.first_token_s is None for record in result.records] == [True, False]
    assert summarize(result, 1).num_refused == 1


# What it is made of


def test_it_runs_the_parts_that_serve() -> None:
    simulation = Simulation(Trace(BLOCK_SIZE, [request()]), make_model(), POLICIES["prefix"], 2)

    (ingress,) = simulation.ingresses
    assert type(ingress.policy) is PrefixPolicy
    assert type(ingress.index) is PrefixIndex
    assert all(type(view) is ReplicaView for view in ingress.views)
    assert all(type(replica.engine) is Engine for replica in simulation.replicas)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_result(kind: str, policy: str) -> None:
    requests = bursts(6, 0.2)

    one, other = (play(*requests, kind=kind, policy=policy, replicas=3) for _ in range(2))

    assert one == other
    assert all(record.end_s > record.arrival_s for record in one.records)


def test_time_is_virtual() -> None:
    year_s = 365 * 86_400.0

    result = play(request(), request(year_s), replicas=2)

    assert result.end_s > year_s


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_replicas_share_the_work(kind: str) -> None:
    requests = [request(i / 1000, num_output=100, chain=i) for i in range(300)]

    result = play(*requests, kind=kind, policy="least-load", replicas=1000)

    assert max(Counter(record.replica for record in result.records).values()) == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 3000), st.integers(0, 40), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 3),
)
def test_every_request_is_served_to_its_end(
    rows: list[tuple[float, int, int, int]], kind: str, policy: str, replicas: int
) -> None:
    requests = [request(at_s, prompt, output, chain=chain) for at_s, prompt, output, chain in sorted(rows)]

    result = play(
        *requests, kind=kind, policy=policy, replicas=replicas, num_kv_tokens=64 * 64, max_num_seqs=4
    )

    for record in result.records:
        num_uncached = record.num_prompt_tokens - record.num_cached_tokens
        assert num_uncached >= 1
        assert record.ttft_s >= STEP_S + num_uncached * PER_TOKEN_S - 1e-9
        assert record.end_s >= record.first_token_s


# What it says about placement


def test_longest_match_is_a_trap_where_all_prompts_begin_alike() -> None:
    requests = [request(i * 0.05, 4000 + i, 50, shared=1) for i in range(60)]

    worst, best = (
        summarize(play(*requests, policy=policy, replicas=4), 4) for policy in ("longest-match", "prefix")
    )

    assert worst.most_tokens_over_mean > 3.9
    assert best.most_tokens_over_mean < 1.5
    assert best.ttft_mean_s < worst.ttft_mean_s / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_siblings", "gap_s", "within_s"),
    [(8, 1.0, 0.0), (8, 0.3, 0.02), (8, 0.15, 0.002), (16, 0.15, 0.02)],
)
def test_several_ingresses_gather_siblings_as_well_as_one(
    kind: str, num_siblings: int, gap_s: float, within_s: float
) -> None:
    requests = bursts(30, gap_s, num_siblings, within_s)

    alone, apart = (
        summarize(play(*requests, kind=kind, replicas=4, ingresses=ingresses, run_ahead=1), 4)
        for ingresses in (1, 4)
    )

    assert alone.hit_share > 0.75
    assert apart.hit_share >= 0.99 * alone.hit_share
    assert apart.ttft_mean_s <= 1.1 * alone.ttft_mean_s


# The command


def test_the_command_adds_its_figures_to_a_file_and_draws_a_page(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i * 100, "input_length": 600, "output_length": 5, "hash_ids": [0, i]} for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    found, page = tmp_path / "found.json", tmp_path / "page.html"
    command = ["simulate", str(trace), "--replicas", "2", "--json", str(found), "--html", str(page)]

    for policy in ("prefix", "round-robin,least-load"):
        outcome = CliRunner().invoke(app, [*command, "--policy", policy])
        assert outcome.exit_code == 0, outcome.output

    runs = json.loads(found.read_text())["runs"]
    assert [run["policy"] for run in runs] == ["prefix", "round-robin", "least-load"]
    assert all(run["environment"]["date"] and run["settings"]["replicas"] == 2 for run in runs)
    assert all(run["num_requests"] == 20 and run["hit_share"] > 0.3 for run in runs)
    assert "least-load" in page.read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 3}', '{"bench": "soak"}'])
def test_a_file_that_holds_something_else_is_told_and_kept(tmp_path, text: str) -> None:
    trace, found = tmp_path / "trace.jsonl", tmp_path / "found.json"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}')
    found.write_text(text)

    outcome = CliRunner().invoke(app, ["simulate", str(trace), "--json", str(found)])

    assert isinstance(outcome.exception, InvalidRequest)
    assert "holds no runs of" in str(outcome.exception)
    assert found.read_text() == text


def test_the_page_is_well_formed_and_says_all_names() -> None:
    result = play(*bursts(3, 0.5), replicas=2)
    runs = [Run(name, summarize(result, 2), curves(result, 2)) for name in ("a", "b<c")]

    html = render_page("title", {"rate": 1.0}, runs)

    root = ElementTree.fromstring(html.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}svg")) == 4 + 2 * 2
    assert "b<c" in [cell.text for cell in root.iter("th")]
