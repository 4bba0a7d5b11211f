"""The prefix index against a plain model of what replicas hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import wire
from router.placement.prefix_index import MOST_WALKED, PrefixIndex
from workers.engine.block_hash import hash_blocks
from workers.engine.cache_log import DEVICE, HOST, CacheLog


def chain(num_blocks: int, first_token: int = 0) -> list[bytes]:
    return hash_blocks([first_token + i for i in range(num_blocks)], 1, b"root")


def load(
    index: PrefixIndex,
    replica_id: str,
    hashes: list[bytes],
    next_sequence: int = 0,
    host_hashes: list[bytes] = [],  # noqa: B006  # never changed
) -> None:
    for _ in index.load_snapshot(replica_id, next_sequence, b"".join(hashes), b"".join(host_hashes)):
        pass


@pytest.fixture
def index() -> Iterator[PrefixIndex]:
    index = PrefixIndex(max_hashes=1000)
    yield index
    index.check()


@given(num_held=st.integers(0, 300), num_asked=st.integers(0, 300))
def test_a_match_is_the_length_of_the_common_prefix(num_held: int, num_asked: int) -> None:
    index = PrefixIndex()
    hashes = chain(300)
    load(index, "a", hashes[:num_held])

    assert index.match("a", hashes[:num_asked]) == (min(num_held, num_asked), 0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 12), st.booleans()), max_size=40
    )
)
def test_events_leave_the_index_as_the_replicas_are(
    changes: list[tuple[str, int, int, bool]],
) -> None:
    index = PrefixIndex()
    chains = [chain(12, first_token=100 * i) for i in range(4)]
    depth = {(replica, i): 0 for replica in "abc" for i in range(4)}
    sequence = dict.fromkeys("abc", 0)
    for replica in "abc":
        load(index, replica, [])

    for replica, number, target, is_snapshot in changes:
        now = depth[replica, number]
        stored = chains[number][now:target]
        evicted = chains[number][target:now]  # tails first: what stays is a prefix
        depth[replica, number] = target
        if is_snapshot:
            sequence[replica] += 7
            held = [h for i in range(4) for h in chains[i][: depth[replica, i]]]
            load(index, replica, held, sequence[replica])
        else:
            assert index.apply(replica, sequence[replica], b"".join(stored), b"".join(evicted))
            sequence[replica] += len(stored) + len(evicted)
        index.check()

    for (replica, number), held_blocks in depth.items():
        assert index.match(replica, chains[number]) == (held_blocks, 0)


def test_a_gap_is_reported_once_and_nothing_changes_until_a_snapshot(index: PrefixIndex) -> None:
    hashes = chain(4)
    load(index, "a", hashes[:1])

    assert not index.apply("a", 5, b"".join(hashes[1:]), b"")
    assert index.apply("a", 8, b"".join(hashes[1:]), b"")  # ignored: a snapshot is on its way
    assert index.match("a", hashes) == (1, 0)

    load(index, "a", hashes[:3], next_sequence=9)
    assert index.apply("a", 9, hashes[3], b"")
    assert index.match("a", hashes) == (4, 0)


def test_a_removed_replica_is_gone_at_once(index: PrefixIndex) -> None:
    load(index, "a", chain(500))

    index.remove("a")

    assert index.match("a", chain(500)) == (0, 0)
    assert index.num_hashes == 0


def test_the_index_does_not_outgrow_its_bound(index: PrefixIndex) -> None:
    load(index, "a", chain(900))
    load(index, "b", chain(900))
    assert index.num_hashes == 1000
    assert index.num_dropped == 800

    assert index.apply("a", 0, b"".join(chain(50, first_token=5000)), b"".join(chain(900)[-100:]))

    assert index.num_dropped == 850
    index.check()


def test_within_a_message_evictions_come_after_what_was_stored(index: PrefixIndex) -> None:
    hashes = chain(3)
    load(index, "a", [])

    index.apply("a", 0, b"".join(hashes), hashes[2])

    assert index.match("a", hashes) == (2, 0)


def test_what_follows_on_the_host_is_counted_apart(index: PrefixIndex) -> None:
    hashes = chain(10)
    load(index, "a", hashes[:3], host_hashes=hashes[3:7])
    load(index, "b", [], host_hashes=hashes[:2])

    assert index.match("a", hashes) == (3, 4)
    assert index.match("a", hashes[:2]) == (2, 0)
    assert index.match("b", hashes) == (0, 2)
    assert index.num_hashes_of("a") == 7


def test_a_block_on_the_host_behind_a_hole_does_not_count(index: PrefixIndex) -> None:
    hashes = chain(40)
    load(index, "a", hashes[:2], host_hashes=hashes[3:])
    load(index, "b", hashes[:2], host_hashes=hashes[2:9] + hashes[10:])

    assert index.match("a", hashes) == (2, 0)
    assert index.match("b", hashes) == (2, 7)


def test_behind_blocks_on_the_host_those_of_the_device_are_there_too(index: PrefixIndex) -> None:
    hashes = chain(9)
    load(index, "a", hashes[5:8], host_hashes=hashes[:5])

    assert index.match("a", hashes) == (0, 8)


def test_a_long_chain_on_the_host_is_found_to_its_end() -> None:
    index = PrefixIndex()
    hashes = chain(3 * MOST_WALKED)
    load(index, "a", hashes[:5], host_hashes=hashes[5:-7])

    assert index.match("a", hashes) == (5, 3 * MOST_WALKED - 12)


def test_a_full_index_still_moves_blocks_between_tiers() -> None:
    index = PrefixIndex(max_hashes=4)
    hashes = chain(4)
    load(index, "a", hashes)

    assert index.apply("a", 0, b"", b"", b"".join(hashes[2:]))
    assert index.match("a", hashes) == (2, 2)
    assert index.apply("a", 2, hashes[2], b"")
    assert index.match("a", hashes) == (3, 1)
    assert index.num_dropped == 0
    index.check()


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(("stored", "evicted")), st.integers(0, 7), st.sampled_from((DEVICE, HOST))
            ),
            st.sampled_from((("tell", 0, 0), ("lose", 0, 0), ("attach", 0, 0))),
        ),
        max_size=80,
    )
)
def test_whatever_an_engine_tells_and_is_lost_the_index_comes_to_know_its_tiers(
    changes: list[tuple[str, int, int]],
) -> None:
    log, index = CacheLog(), PrefixIndex()
    hashes = chain(8)
    tiers = dict.fromkeys(hashes, 0)

    def attach() -> None:
        snapshot = wire.snapshot_to_wire(log.snapshot())
        for _ in index.load_snapshot("a", snapshot.next_sequence, snapshot.hashes, snapshot.host_hashes):
            pass

    def tell() -> None:
        if (events := log.drain()) is not None:
            message = wire.cache_events_to_wire(events)
            is_in_order = index.apply(
                "a", message.first_sequence, message.stored, message.evicted, message.offloaded
            )
            if not is_in_order:
                attach()
        index.check()

    attach()
    for change, number, tier in changes:
        block_hash = hashes[number]
        if change == "stored" and not tiers[block_hash] & tier:
            log.stored(block_hash, tier)
            tiers[block_hash] |= tier
        elif change == "evicted" and tiers[block_hash] & tier:
            log.evicted(block_hash, tier)
            tiers[block_hash] &= ~tier
        elif change == "tell":
            tell()
        elif change == "lose":
            log.drain()
        elif change == "attach":
            index.await_snapshot("a")
            attach()
    tell()
    log.stored(b"a later block...")  # whatever was lost before is noticed with it
    tell()

    for block_hash in hashes:
        on_device, on_host = index.match("a", [block_hash])
        assert on_device == bool(tiers[block_hash] & DEVICE)
        assert on_host == (tiers[block_hash] == HOST)
