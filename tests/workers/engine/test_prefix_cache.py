from __future__ import annotations

from workers.engine.block_hash import hash_blocks

TEXT = list(range(100, 120))


def test_a_prompt_seen_before_is_computed_from_the_first_block_that_differs(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:12], max_tokens=1)
    bench.run()
    bench.add([*TEXT[:8], 1, 2, 3], max_tokens=1)

    plan = bench.plan()

    assert (plan.starts, plan.num_tokens) == ([8], [3])
    assert len(plan.new_block_ids[0]) == 3  # two found, one new


def test_the_last_token_known_is_computed_even_if_its_block_is_cached(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:8], max_tokens=1)
    bench.run()
    bench.add(TEXT[:8], max_tokens=1)

    plan = bench.plan()

    assert (plan.starts, plan.num_tokens) == ([4], [4])


def test_requests_of_one_burst_share_blocks_that_the_same_plan_fills(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add([*TEXT[:8], 1], max_tokens=1)
    bench.add([*TEXT[:8], 2], max_tokens=1)

    plan = bench.plan()

    assert plan.starts == [8, 0]  # the second computes one token, which makes it a decode
    assert plan.num_tokens == [1, 9]
    assert plan.new_block_ids[0][:2] == plan.new_block_ids[1][:2]


def test_hits_are_reported_once_in_the_first_output(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()
    bench.add(TEXT[:9], max_tokens=3)
    bench.run()

    assert [output.num_cached_tokens for output in bench.outputs] == [0, 8, None, None]
    load = bench.engine.load()
    assert (load.num_prompt_tokens, load.num_cached_tokens) == (18, 8)


def test_an_answer_is_cached_for_the_next_turn_of_the_conversation(make_bench) -> None:
    bench = make_bench(block_size=4)
    first = bench.add(TEXT[:6], max_tokens=7)
    bench.run()
    bench.add([*TEXT[:6], *bench.token_ids[first], 9], max_tokens=1)

    assert bench.plan().starts == [12]  # 13 tokens of which the last was never computed


def test_requests_under_different_roots_never_share(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:8], max_tokens=1)
    bench.run()

    bench.add(TEXT[:8], max_tokens=1, hash_root=b"another tenant")

    assert bench.plan().starts == [0]


def test_hashes_of_the_edge_and_of_the_engine_agree(make_bench) -> None:
    bench = make_bench(block_size=4, hash_root=b"root")
    bench.add(TEXT[:9], max_tokens=1)
    bench.run()

    events = bench.engine.drain_cache_events()

    assert events.stored == hash_blocks(TEXT[:9], 4, b"root")
    assert events.evicted == []


def test_without_prefix_caching_nothing_is_found_and_nothing_told(make_bench) -> None:
    bench = make_bench(enable_prefix_caching=False)
    bench.add(TEXT[:8], max_tokens=1)
    bench.run()
    bench.add(TEXT[:8], max_tokens=1)

    assert bench.plan().starts == [0]
    assert bench.engine.drain_cache_events() is None


def test_the_tail_of_an_old_chain_is_evicted_before_its_head(make_bench) -> None:
    bench = make_bench(block_size=4, num_blocks=4)
    bench.add(TEXT[:12], max_tokens=1)
    bench.run()
    head, middle, tail = bench.engine.drain_cache_events().stored

    bench.add([1, 2, 3, 4, 5], max_tokens=1)  # two blocks: the one never used, and one of the chain
    bench.run()

    assert bench.engine.drain_cache_events().evicted == [tail]
    assert {head, middle} <= set(bench.engine.cache_snapshot().hashes)


def test_a_snapshot_is_the_cache_as_listeners_know_it(make_bench) -> None:
    bench = make_bench(block_size=4)
    bench.add(TEXT[:8], max_tokens=1)
    bench.run()
    told = bench.engine.drain_cache_events()
    bench.add([1, 2, 3, 4, 5], max_tokens=1)
    bench.run()

    snapshot = bench.engine.cache_snapshot()

    assert sorted(snapshot.hashes) == sorted(told.stored)
    assert snapshot.next_sequence == bench.engine.drain_cache_events().first_sequence == 2
