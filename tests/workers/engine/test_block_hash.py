from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.block_hash import HASH_BYTES, hash_blocks, make_root

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_equal_hashes_mean_equal_beginnings(a: list[int], b: list[int], block_size: int) -> None:
    pairs = zip(hash_blocks(a, block_size, b"r"), hash_blocks(b, block_size, b"r"), strict=False)
    num_shared = sum(x == y for x, y in pairs)

    assert a[: num_shared * block_size] == b[: num_shared * block_size]


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int) -> None:
    hashes = hash_blocks(token_ids, block_size, b"root")

    assert len(hashes) == len(token_ids) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


def test_the_hash_is_the_same_in_every_process_and_release() -> None:
    [block_hash] = hash_blocks([1, 2, 3], 3, b"shoal")

    assert block_hash.hex() == "9bee14152b2597b760429ba3d44d9732"


def test_parts_of_a_root_do_not_run_into_each_other() -> None:
    assert make_root("ab", "c") != make_root("a", "bc")
    assert make_root("ab") == make_root(b"ab")
