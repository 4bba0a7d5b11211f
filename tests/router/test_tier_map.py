"""The map of tiers against a plain dict."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from router.placement.tier_map import TierMap
from workers.engine.cache_log import DEVICE, HOST

HASHES = st.lists(st.binary(min_size=1, max_size=2), max_size=60)


@given(st.lists(st.tuples(st.sampled_from((DEVICE, HOST, None)), HASHES), max_size=12))
def test_it_holds_what_a_dict_would_hold(changes: list[tuple[int | None, list[bytes]]]) -> None:
    tiers, expected = TierMap(), dict[bytes, int]()

    for tier, changed in changes:
        if tier is not None:
            assert tiers.put_all(changed, tier, 10**6) == 0
            expected.update(dict.fromkeys(changed, tier))
        else:
            tiers.discard_all(changed)
            for block_hash in changed:
                expected.pop(block_hash, None)

        assert len(tiers) == len(expected)
        assert dict(tiers) == expected


def test_what_is_there_may_move_though_nothing_new_may_come() -> None:
    tiers = TierMap()
    assert tiers.put_all([b"a1", b"a2", b"a3"], DEVICE, 2) == 1

    assert tiers.put_all([b"a1", b"b1"], HOST, 0) == 1

    assert dict(tiers) == {b"a1": HOST, b"a2": DEVICE}


def test_no_part_of_a_large_map_is_long_to_grow() -> None:
    tiers = TierMap()
    tiers.put_all((i.to_bytes(2) for i in range(65536)), DEVICE, 65536)

    assert max(map(len, tiers.parts)) == 256


def test_the_collector_passes_over_all_hashes() -> None:
    tiers = TierMap()
    tiers.put_all((i.to_bytes(2) for i in range(65536)), DEVICE, 65536)
    gc.collect()

    assert not any(map(gc.is_tracked, tiers.parts))


def test_dropping_forgets_part_by_part_until_nothing_is_left() -> None:
    tiers = TierMap()
    tiers.put_all([b"a1", b"a2", b"b1"], DEVICE, 3)

    assert [tiers.drop(), tiers.drop(), tiers.drop()] == [1, 2, 0]
    assert len(tiers) == 0
