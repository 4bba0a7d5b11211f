"""What the metrics say after requests, under Shoal's names and under vLLM's."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from router.config import Observability
from router.openai.gap_histogram import GapHistogram
from router.scripted_replica import ScriptedReplica

VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_preemptions_total",
}  # fmt: skip


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def test_every_choice_is_counted_by_how_it_ended(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    await edge.complete(max_tokens=3)
    await edge.complete(max_tokens=3, n=2, stream=True)

    found = samples((await edge.client.get("/metrics")).text)

    (ended,) = found["shoal_requests_total"]
    assert (ended.labels, ended.value) == ({"model": "tiny", "finish_reason": "length"}, 3)
    assert next(s for s in found["shoal_inter_token_seconds_count"]).value >= 2
    assert not any(name.startswith("vllm:") for name in found)


async def test_every_cache_tells_how_full_it_is_and_may_be(make_edge) -> None:
    edge = await make_edge(ScriptedReplica())
    await edge.complete(max_tokens=3)

    found = samples((await edge.client.get("/metrics")).text)

    entries, most, num_bytes = (
        {tuple(one.labels.values()): one.value for one in found[name]}
        for name in ("shoal_cache_entries", "shoal_cache_max_entries", "shoal_cache_bytes")
    )
    assert {cache for cache, _ in entries} == {"ended_requests", "prefix_index", "coming_blocks", "grammars"}
    assert entries["ended_requests", ""] == 1
    assert 100 < num_bytes["ended_requests", ""] < 10_000
    assert all(entries[one] <= most[one] for one in entries)
    assert most["prefix_index", "tiny"] == 8_000_000


async def test_vllms_names_are_there_if_asked_for_with_its_labels(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), observability=Observability(vllm_metric_names=True))
    await edge.complete(max_tokens=3)

    found = samples((await edge.client.get("/metrics")).text)

    assert set(found) >= VLLM_NAMES
    for name in VLLM_NAMES:
        assert {sample.labels["model_name"] for sample in found[name]} == {"tiny"}
    assert found["vllm:request_success_total"][0].labels["finished_reason"] == "length"
    own, theirs = found["shoal_request_seconds_count"][0], found["vllm:e2e_request_latency_seconds_count"][0]
    assert own.value == theirs.value == 1


async def test_what_an_ingress_exports_on_its_node_leaves_replicas_to_themselves(make_edge) -> None:
    edge = await make_edge(ScriptedReplica(), observability=Observability(vllm_metric_names=True))
    await edge.complete(max_tokens=3)

    own = samples(edge.app.state.metrics.render_own().decode())

    assert "shoal_time_to_first_token_seconds_count" in own
    assert not any(name.startswith("shoal_replica_") or name == "vllm:num_requests_running" for name in own)


def test_a_gap_falls_into_the_buckets_that_hold_it() -> None:
    histogram = GapHistogram("gap", "Gaps", (0.01, 0.1))
    for gap_s in (0.005, 0.01, 0.05, 3.0):
        histogram.child("a").observe(gap_s)

    (family,) = histogram.collect()

    values = {(s.name, s.labels.get("le")): s.value for s in family.samples}
    assert values["gap_bucket", "0.01"] == 2
    assert values["gap_bucket", "0.1"] == 3
    assert values["gap_bucket", "+Inf"] == values["gap_count", None] == 4
    assert values["gap_sum", None] == 3.065
