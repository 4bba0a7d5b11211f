"""A pooled request is a prompt that is computed and nothing more."""

from __future__ import annotations

import pytest

from workers.engine.errors import InvalidRequest

TEXT = list(range(100, 120))


def test_a_mean_is_over_all_tokens_so_no_block_is_taken_from_the_cache(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:12], max_tokens=1)
    bench.run()
    bench.add(TEXT[:12], max_tokens=1, pooling="mean")

    plan = bench.plan()

    assert (plan.starts, plan.num_tokens) == ([0], [12])


def test_the_last_hidden_state_needs_the_last_token_only(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:12], max_tokens=1)
    bench.run()
    bench.add(TEXT[:12], max_tokens=1, pooling="last")

    plan = bench.plan()

    assert (plan.starts, plan.num_tokens) == ([8], [4])


def test_a_pooled_request_generates_nothing_else(make_bench) -> None:
    bench = make_bench()

    with pytest.raises(InvalidRequest) as caught:
        bench.add(4, max_tokens=2, pooling="mean")

    assert caught.value.param == "max_tokens"
