"""Whatever the schedule, each request yields what a pure function of its tokens yields.

The rank checks every KV slot that it reads, so a block reused too early fails at the step that does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from workers.engine.block_hash import hash_blocks
from workers.engine.cache_log import DEVICE, HOST
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.request import BeamParams, FinishReason

EOS = 7


@dataclass(frozen=True)
class Wish:
    """A request to be added; prompts share prefixes because they are cut from few texts."""

    text: int
    prompt_len: int
    num_earlier: int
    priority: int
    is_hashed: bool
    num_choices: int
    beam_width: int
    sampling: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        """A beam search takes no other limits of its output."""
        if not self.beam_width:
            return self.sampling
        others = {
            key: self.sampling[key] for key in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
        }
        return {**others, "beams": BeamParams(self.beam_width, 0.7, early_stopping=None)}

    @property
    def prompt(self) -> list[int]:
        return [self.text * 10 + index // 3 for index in range(self.prompt_len)]


wishes = st.builds(
    Wish,
    text=st.integers(0, 2),
    prompt_len=st.integers(1, 20),
    num_earlier=st.sampled_from([0, 0, 0, 1, 5]),
    priority=st.integers(0, 2),
    is_hashed=st.booleans(),
    num_choices=st.sampled_from([1, 1, 2, 4]),
    beam_width=st.sampled_from([0, 0, 0, 1, 2, 3]),
    sampling=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 14),
            "min_tokens": st.integers(0, 5),
            "seed": st.integers(0, 2),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.sampled_from([(), (1, 2, 3), tuple(range(0, 1000, 5))]),
            "grammar": st.sampled_from(["", "", "7:100", "3:4", "11:9"]),
            "thinking_end": st.sampled_from([(), (), (5,), (0, 5)]),
            "thinking_budget": st.none() | st.integers(0, 6),
        }
    ),
)

# A fit may find that parts of a step cost nothing; which steps there are follows it, that they are made does not.
costs = st.sampled_from(
    [
        None,
        None,
        CostModel(base_s=0.0),
        CostModel(per_token_s=0.0),
        CostModel(base_s=0.0, per_sequence_s=0.0),
        CostModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
)
configs = st.fixed_dictionaries(
    {
        "cost": costs,
        "max_model_len": st.integers(8, 40),
        "num_blocks": st.integers(3, 24),
        "block_size": st.integers(1, 5),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 24),
        "enable_prefix_caching": st.booleans(),
        "run_ahead": st.integers(0, 2),
        "max_preemptions": st.integers(0, 3),
        "num_host_blocks": st.sampled_from([0, 0, 4, 30]),
        "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
        "copy_lag": st.integers(0, 2),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "replays_outputs": st.sampled_from([False, False, True]),
        "max_step_growth": st.sampled_from([None, None, 0.5]),
        "eos_token_ids": st.sampled_from([(), (EOS,), tuple(range(0, 1000, 9))]),
    }
)

# An abort or release names a request by its number, which may be over or not yet there.
actions = st.lists(
    st.one_of(
        st.just(("plan", 0)),
        st.just(("apply", 0)),
        st.just(("add", 0)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.just(("tell", 0)),
    ),
    max_size=60,
)

# Pools so tight that requests are preempted in most runs; each turn is a number of plans, then of results.
tight_configs = st.fixed_dictionaries(
    {
        "cost": costs,
        "num_blocks": st.integers(12, 16),
        "block_size": st.just(2),
        "max_num_batched_tokens": st.integers(3, 24),
        "enable_prefix_caching": st.booleans(),
        "run_ahead": st.integers(1, 2),
        "max_preemptions": st.integers(0, 3),
        "num_host_blocks": st.sampled_from([0, 5, 40]),
        "kv_host_fraction": st.sampled_from([0.0, 0.5]),
        "preemption_mode": st.sampled_from(["auto", "swap", "swap", "recompute"]),
        "copy_lag": st.integers(0, 2),
        "policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "replays_outputs": st.sampled_from([False, False, True]),
    }
)


any_schedule = given(config=configs, wishes=st.lists(wishes, min_size=1, max_size=10), actions=actions)
crowd = given(
    config=tight_configs,
    prompts=st.lists(st.tuples(st.integers(1, 11), st.integers(0, 2)), min_size=3, max_size=6),
    seed=st.integers(0, 99),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=25),
)


def check_any_schedule(
    make_bench: Callable[..., Any], config: dict[str, Any], wishes: list[Wish], actions: list[tuple[str, int]]
) -> None:
    bench = make_bench(**config)
    engine = bench.engine
    pending = list(wishes)
    aborted: set[str] = set()
    heard: dict[int, set[bytes]] = {DEVICE: set(), HOST: set()}
    next_sequence = 0

    def add() -> None:
        if pending:
            wish = pending.pop()
            # Tokens that an engine elsewhere would have generated, as far as it got.
            num_earlier = 0 if wish.sampling["grammar"] or wish.beam_width else wish.num_earlier
            earlier = [3] * min(num_earlier, config["max_model_len"] - wish.prompt_len)
            hashes = hash_blocks([*wish.prompt, *earlier], config["block_size"], engine.config.hash_root)
            num_rows = max(wish.beam_width, 1)
            try:
                for choice_index in range(1 if wish.beam_width else wish.num_choices):
                    bench.add(
                        wish.prompt,
                        output_token_ids=earlier,
                        priority=wish.priority,
                        block_hashes=hashes if wish.is_hashed else [],
                        choice_index=choice_index,
                        **wish.params,
                    )
            except PromptTooLong:
                assert (
                    wish.prompt_len >= config["max_model_len"]
                    or (wish.prompt_len + wish.params["max_tokens"] + config["block_size"]) * num_rows
                    > config["num_blocks"] * config["block_size"]
                )
            except InvalidRequest:
                assert wish.beam_width > config["max_num_seqs"]

    def listen() -> None:
        nonlocal next_sequence
        events = engine.drain_cache_events()
        if events is not None:
            assert events.first_sequence == next_sequence
            next_sequence += events.num_events
            assert heard[DEVICE].isdisjoint(events.stored)
            heard[DEVICE].update(events.stored)
            heard[HOST].difference_update(events.stored)
            assert heard[HOST].isdisjoint(events.offloaded)
            heard[HOST].update(events.offloaded)
            heard[DEVICE].difference_update(events.offloaded)
            assert (heard[DEVICE] | heard[HOST]).issuperset(events.evicted)
            for hashes in heard.values():
                hashes.difference_update(events.evicted)
        snapshot = engine.cache_snapshot()
        assert sorted(snapshot.hashes) == sorted(heard[DEVICE])
        assert sorted(snapshot.host_hashes) == sorted(heard[HOST])
        assert snapshot.next_sequence == next_sequence

    for action, number in actions:
        if action == "add":
            add()
        elif action == "plan":
            bench.plan()
        elif action == "apply" and bench.rank.ready():
            bench.apply()
        elif action == "abort" and engine.abort(f"r{number}"):
            aborted.add(f"r{number}")
            engine.check()
        elif action == "release" and engine.release(f"r{number}"):
            aborted.add(f"r{number}")
            engine.check()
            assert not bench.token_ids[f"r{number}"], "a request was given back that had begun"
        elif action == "tell":
            listen()
    while pending:
        add()
    bench.run()
    listen()

    for request_id in bench.requests:
        if request_id in aborted:
            assert request_id not in bench.finish_reasons
            if bench.requests[request_id].params.beams is not None:
                continue
            token_ids, _ = bench.expected(request_id)
            assert token_ids[: len(bench.token_ids[request_id])] == bench.token_ids[request_id]
        else:
            bench.assert_as_expected(request_id)
    load = engine.load()
    assert load.num_free_blocks == load.num_blocks
    assert load.num_free_host_blocks == load.num_host_blocks
    counts = [output.num_preemptions for output in bench.outputs]
    assert max(counts, default=0) <= config["max_preemptions"]
    assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
    assert FinishReason.ERROR not in bench.finish_reasons.values()


def check_crowd(
    make_bench: Callable[..., Any],
    config: dict[str, Any],
    prompts: list[tuple[int, int]],
    seed: int,
    turns: list[tuple[int, int]],
) -> None:
    bench = make_bench(**config)
    for prompt_len, priority in prompts:
        kind = (prompt_len + seed) % 4
        if kind == 3 and 2 * (prompt_len + 12) <= 2 * config["num_blocks"]:
            bench.add(prompt_len, max_tokens=12, beams=BeamParams(2, early_stopping=None), priority=priority)
        prompt = [seed, *range(prompt_len)]
        for choice_index in range(1 + (kind == 2)):
            bench.add(prompt, max_tokens=12, seed=seed, choice_index=choice_index, priority=priority)

    for num_plans, num_results in turns:
        for _ in range(num_plans):
            bench.plan()
        for _ in range(min(num_results, bench.engine.num_launched)):
            bench.apply()
    bench.run()

    bench.assert_all_as_expected()
    load = bench.engine.load()
    assert load.num_free_blocks == load.num_blocks
    assert load.num_free_host_blocks == load.num_host_blocks
    assert max(output.num_preemptions for output in bench.outputs) <= config["max_preemptions"]
    event(f"preemptions: {min(load.num_preemptions, 5)}")
    event(f"swapped out and back: {min(load.num_swap_preemptions, 5)}")
    event(f"blocks shared: {min(load.num_forked_blocks, 5)}")
    event(f"shared blocks copied: {min(load.num_tail_copies, 5)}")


@any_schedule
@settings(max_examples=400, deadline=None)
def test_any_schedule_yields_the_same_tokens(make_bench, config, wishes, actions) -> None:
    check_any_schedule(make_bench, config, wishes, actions)


@crowd
@settings(max_examples=300, deadline=None)
def test_requests_that_crowd_each_other_out_still_yield_the_same_tokens(
    make_bench, config, prompts, seed, turns
) -> None:
    check_crowd(make_bench, config, prompts, seed, turns)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@any_schedule
@settings(max_examples=5000, deadline=None)
def test_any_of_5000_schedules_yields_the_same_tokens(make_bench, config, wishes, actions) -> None:
    check_any_schedule(make_bench, config, wishes, actions)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@crowd
@settings(max_examples=5000, deadline=None)
def test_5000_crowds_yield_the_same_tokens(make_bench, config, prompts, seed, turns) -> None:
    check_crowd(make_bench, config, prompts, seed, turns)
