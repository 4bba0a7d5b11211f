"""The set of hashes against Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.placement.hash_set import HashSet

HASHES = st.lists(st.binary(min_size=1, max_size=2), max_size=60)


@given(st.lists(st.tuples(st.booleans(), HASHES), max_size=12))
def test_it_holds_what_a_set_would_hold(changes: list[tuple[bool, list[bytes]]]) -> None:
    hashes, expected = HashSet(), set[bytes]()

    for is_added, changed in changes:
        if is_added:
            hashes.add_all(changed)
            expected.update(changed)
        else:
            hashes.discard_all(changed)
            expected.difference_update(changed)

        assert len(hashes) == len(expected)
        assert set(hashes) == expected
        assert all((h in hashes) == (h in expected) for h in changed)


def test_no_part_of_a_large_set_is_long_to_grow() -> None:
    hashes = HashSet()
    hashes.add_all(i.to_bytes(2) for i in range(65536))

    assert max(map(len, hashes.parts)) == 256


def test_dropping_forgets_part_by_part_until_nothing_is_left() -> None:
    hashes = HashSet()
    hashes.add_all([b"a1", b"a2", b"b1"])

    assert [hashes.drop(), hashes.drop(), hashes.drop()] == [1, 2, 0]
    assert len(hashes) == 0
