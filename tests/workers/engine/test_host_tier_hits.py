"""A host tier of any size finds no less than none would, and makes no request wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from workers.engine.cost_model import CostModel

PROMPT_BLOCKS = 10
SIZES = [1, 3, 5, 8, 10, 15, 20, 23, 31, 60]
"""Of the host, in blocks: less than a prompt to twice the largest pool."""


def make_prompts(draw: random.Random, num_prompts: int, lengths: range) -> list[list[int]]:
    return [[draw.randrange(900) for _ in range(draw.choice(lengths))] for _ in range(num_prompts)]


def tokens_found(
    make_bench: Any, num_host_blocks: int, prompts: list[list[int]], max_tokens: int = 5, **fields: Any
) -> list[int]:
    """Prompt tokens that each request, one after the other, finds cached."""
    bench = make_bench(num_host_blocks=num_host_blocks, run_ahead=1, **fields)
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens)
        bench.run()
    bench.assert_all_as_expected()
    return [output.num_cached_tokens for output in bench.outputs if output.num_cached_tokens is not None]


@pytest.mark.parametrize("num_blocks", [12, 25, 31])
@pytest.mark.parametrize("copy_lag", [0, 1, 3])
def test_no_request_finds_less_with_a_host_tier_of_any_size(
    make_bench, num_blocks: int, copy_lag: int
) -> None:
    draw = random.Random(num_blocks)
    prompts = make_prompts(draw, 3, range(20, 4 * PROMPT_BLOCKS))
    turns = [*prompts * 3, *(draw.choice(prompts) for _ in range(9))]
    fields = {"num_blocks": num_blocks, "copy_lag": copy_lag, "max_num_batched_tokens": 16}

    without = tokens_found(make_bench, 0, turns, **fields)

    for num_host_blocks in SIZES:
        found = tokens_found(make_bench, num_host_blocks, turns, **fields)
        worse = [turn for turn, (with_, less) in enumerate(zip(found, without, strict=True)) if with_ < less]
        assert not worse, f"{num_host_blocks} host blocks: requests {worse} find less than without"


def test_a_host_tier_of_half_the_pool_finds_more(make_bench) -> None:
    # Three prompts in turn, with their outputs 14 blocks each: they take each other's tails in a pool of 31.
    turns = make_prompts(random.Random(3), 3, range(40, 41)) * 6

    def share(num_host_blocks: int) -> float:
        fields = {"num_blocks": 31, "copy_lag": 1, "max_num_batched_tokens": 128}
        found = tokens_found(make_bench, num_host_blocks, turns, max_tokens=15, **fields)
        return sum(found) / sum(map(len, turns))

    assert share(8) > share(0) + 0.2
    assert share(15) > share(0) + 0.2
    assert share(62) > share(15) + 0.1


def test_requests_at_once_find_no_less_with_a_host_tier_of_any_size(make_bench) -> None:
    # Who comes back from the host holds its blocks a step or two longer: a single run may go either way.
    def share(num_host_blocks: int) -> float:
        num_found = num_tokens = 0
        for seed in range(6):
            draw = random.Random(seed)
            bench = make_bench(
                num_blocks=45,
                num_host_blocks=num_host_blocks,
                copy_lag=1,
                run_ahead=1,
                max_num_batched_tokens=64,
            )
            prompts = make_prompts(draw, 6, range(20, 4 * PROMPT_BLOCKS))
            for _ in range(60):
                bench.add(draw.choice(prompts), max_tokens=4)
                for _ in range(draw.choice([0, 0, 2, 9])):
                    if bench.engine.has_work:
                        bench.step()
            bench.run()
            bench.assert_all_as_expected()
            load = bench.engine.load()
            num_found += load.num_cached_tokens
            num_tokens += load.num_prompt_tokens
        return num_found / num_tokens

    without = share(0)
    for num_host_blocks in (3, 8, 15, 31):
        assert share(num_host_blocks) >= without - 0.01, f"{num_host_blocks} host blocks"


def test_no_request_waits_for_blocks_that_are_being_copied(make_bench) -> None:
    """Prompts of which none comes again: each step computes what it would compute without a host tier."""

    def steps(num_host_blocks: int) -> list[tuple[list[int], list[int]]]:
        bench = make_bench(
            num_blocks=40,
            num_host_blocks=num_host_blocks,
            copy_lag=5,
            run_ahead=1,
            cost=CostModel(copy_block_s=1e-6),
        )
        draw = random.Random(1)
        computed = []
        for number in range(40):
            bench.add([number, *(draw.randrange(900) for _ in range(draw.randrange(60)))], max_tokens=3)
            if number % 4 == 3:
                while bench.requests.keys() - bench.finish_reasons.keys():
                    while (plan := bench.plan()) is not None:
                        computed.append((plan.rows, plan.num_tokens))
                    bench.apply()
        assert bool(bench.engine.load().num_blocks_swapped_out) is bool(num_host_blocks)
        bench.run()
        return computed

    assert steps(80) == steps(0)
