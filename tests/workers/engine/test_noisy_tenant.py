"""One tenant that asks for ten times its share, under the fair policy: what the others see, in virtual time.

A step takes 8 ms, 0.1 ms a row and 1/15,000 s a prompt token. Four quiet tenants ask for 15 % of the capacity each; the
noisy one's share is what is left.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

PROMPT, OUTPUT, SECONDS = 1024, 32, 40.0
QUIET = ("a", "b", "c", "d")
Arrivals = list[tuple[float, str]]


def arrivals(rates: dict[str, float], seed: int = 1) -> Arrivals:
    """Poisson arrivals; each tenant's are the same whatever the others do."""
    found: Arrivals = []
    for tenant, rate in rates.items():
        rng, now_s = random.Random(f"{seed}{tenant}"), 0.0
        while (now_s := now_s + rng.expovariate(rate)) < SECONDS:
            found.append((now_s, tenant))
    return sorted(found)


def run(make_bench: Any, policy: str, requests: Arrivals) -> tuple[dict[str, list[float]], float]:
    """Seconds to the first token by tenant, and tokens a second that were computed until the arrivals ended."""
    bench = make_bench(
        policy=policy,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        num_blocks=1024,
        block_size=16,
        max_model_len=2048,
    )
    arrived: dict[str, tuple[float, str]] = {}
    first_token_s: dict[str, list[float]] = {}
    num_tokens, position = 0, 0
    while bench.now_s < SECONDS:
        while position < len(requests) and requests[position][0] <= bench.now_s:
            at_s, tenant = requests[position]
            arrived[bench.add(PROMPT, max_tokens=OUTPUT, tenant=tenant)] = (at_s, tenant)
            position += 1
        if not bench.engine.has_work:
            if position == len(requests):
                break
            bench.now_s = requests[position][0]
            continue
        plan = bench.engine.plan(
            bench.now_s
        )  # without the bench's checks, which look at the whole queue each step
        assert plan is not None, "there is work and nothing is planned"
        bench.rank.launch(plan)
        bench.now_s += 0.008 + 0.0001 * len(plan.rows) + plan.num_batched_tokens / 15_000
        num_tokens += plan.num_batched_tokens
        for output in bench.engine.apply(bench.rank.collect(), bench.now_s):
            if output.request_id in arrived and output.token_ids:
                at_s, tenant = arrived.pop(output.request_id)
                first_token_s.setdefault(tenant, []).append(bench.now_s - at_s)
    return first_token_s, num_tokens / bench.now_s


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quiet_tenants_do_not_notice_one_at_ten_times_its_share(make_bench: Any) -> None:
    _, most = run(make_bench, "fcfs", arrivals({"only": 30.0}))
    capacity = most / (PROMPT + OUTPUT)  # requests a second, saturated
    rates = dict.fromkeys(QUIET, 0.15 * capacity)

    def measure(times: float) -> tuple[float, float]:
        found, tokens = run(make_bench, "fair", arrivals({**rates, "noisy": times * 0.38 * capacity}))
        return p99([one for tenant in QUIET for one in found[tenant]]), tokens

    (held_s, _), (noisy_s, tokens) = measure(1.0), measure(10.0)

    assert noisy_s <= 1.2 * held_s
    assert tokens >= 0.97 * most
