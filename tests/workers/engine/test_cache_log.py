from __future__ import annotations

from workers.engine.cache_log import CacheLog


def test_a_change_undone_before_it_was_told_is_never_told() -> None:
    log = CacheLog()
    log.stored(b"a")
    log.evicted(b"a")

    assert log.drain() is None


def test_what_was_evicted_and_stored_again_stays_with_the_listener() -> None:
    log = CacheLog()
    log.stored(b"a")
    log.drain()
    log.evicted(b"a")
    log.stored(b"a")

    assert log.drain() is None


def test_numbers_are_consecutive_over_messages() -> None:
    log = CacheLog()
    log.stored(b"a")
    log.stored(b"b")
    first = log.drain()
    log.evicted(b"a")
    log.stored(b"c")
    second = log.drain()

    assert (first.first_sequence, first.stored, first.evicted) == (0, [b"a", b"b"], [])
    assert (second.first_sequence, second.stored, second.evicted) == (2, [b"c"], [b"a"])
    assert log.snapshot().next_sequence == 4


def test_a_snapshot_leaves_out_what_the_next_message_will_tell() -> None:
    log = CacheLog()
    log.stored(b"a")
    log.drain()
    log.stored(b"b")
    log.evicted(b"a")

    snapshot = log.snapshot()

    assert snapshot.hashes == [b"a"]
    assert snapshot.next_sequence == log.drain().first_sequence
