"""Minutes of steady load: every stream ends, and what was taken for them is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from deploy.bench.http_load import LoadPlan
from deploy.bench.soak import SoakResult, run_soak, slope_per_min
from deploy.deployed_cluster import DeployedCluster
from deploy.served_cluster import ServedCluster

DURATION_S = 300.0


def test_the_slope_of_a_line_is_its_slope_and_noise_has_none() -> None:
    assert slope_per_min([(0, 10), (30, 11), (60, 12)]) == pytest.approx((2.0, 0.0))
    slope, error = slope_per_min([(0, 5), (10, 6), (20, 5), (30, 6), (40, 5)])
    assert slope == pytest.approx(0.0)
    assert error == pytest.approx(
        60 * (1.2 / 3 / 1000) ** 0.5
    )  # squares left, a degree of freedom, of the times
    assert slope_per_min([(0, 5)]) == (0.0, 0.0)


def check_nothing_leaks(found: SoakResult) -> None:
    print(found)
    assert found.num_failed == 0
    assert found.num_requests > found.num_streams
    assert found.gauges_after == dict.fromkeys(found.gauges_after, 0.0)
    assert found.tasks_after <= found.tasks_before
    assert found.tasks_last <= 1.1 * found.tasks_middle
    for kind, growth in found.growth.items():
        assert growth.rss_mib_per_min < 4.0, kind
        assert growth.files_last <= 1.1 * growth.files_middle + 4, kind
        assert growth.threads_last <= growth.threads_middle + 2, kind


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_500_streams_for_five_minutes_leave_nothing_behind(
    start_cluster: Callable[..., ServedCluster],
) -> None:
    cluster = start_cluster(
        *("--scripted", "--scripted-step-s", "0.2", "--max-num-seqs", "256", "--max-model-len", "1024")
    )
    cluster.wait_until_up()
    plan = LoadPlan(f"{cluster.url}/v1", cluster.model, num_streams=500, requests_per_stream=0,
                    input_len=64, output_len=50)  # fmt: skip

    check_nothing_leaks(asyncio.run(run_soak(cluster, plan, DURATION_S)))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_64_streams_of_a_live_model_leave_nothing_behind(cluster: ServedCluster) -> None:
    plan = LoadPlan(f"{cluster.url}/v1", cluster.model, num_streams=64, requests_per_stream=0,
                    input_len=32, output_len=16)  # fmt: skip

    check_nothing_leaks(asyncio.run(run_soak(cluster, plan, DURATION_S)))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_rollout_of_replicas_and_ingresses_in_the_middle_of_64_streams_loses_none() -> None:
    cluster = DeployedCluster(
        {"scripted": True, "scripted_step_s": 0.1, "max_num_seqs": 64, "max_model_len": 1024}, 2, model="soak"
    )

    def roll() -> None:
        cluster.roll_model()
        cluster.roll_ingress()

    try:
        plan = LoadPlan(f"{cluster.url}/v1", cluster.model, num_streams=64, requests_per_stream=0,
                        input_len=64, output_len=50)  # fmt: skip
        found = asyncio.run(run_soak(cluster, plan, 180.0, roll))
    finally:
        cluster.stop()

    print(found)
    assert found.num_failed == 0
    assert found.change is not None
    assert found.change.num_under_way > 64
    assert found.gauges_after == dict.fromkeys(found.gauges_after, 0.0)
