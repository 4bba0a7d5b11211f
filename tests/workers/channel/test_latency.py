from __future__ import annotations

import pytest

from workers.channel.latency import measure_latency


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_latency_is_measured_from_brain_to_the_last_rank(num_ranks: int) -> None:
    latency = measure_latency(num_ranks, num_plans=20, num_warmup=5, gap_s=0.0)

    assert 0 < latency.first_p50_s <= latency.p50_s <= latency.p99_s < 1
    assert f"{num_ranks} ranks, 20 plans" in str(latency)
