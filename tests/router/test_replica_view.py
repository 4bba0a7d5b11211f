"""Bookings: counted until the replica's own figures show them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from router.placement import replica_view
from router.placement.replica_view import NO_LOAD, ReplicaShape, ReplicaView

HASHES = [bytes([i]) * 16 for i in range(4)]


@pytest.fixture
def view() -> Iterator[ReplicaView]:
    view = ReplicaView("a", ReplicaShape())
    yield view
    view.check()


def test_a_booking_counts_at_once(view: ReplicaView) -> None:
    view.book("r", 100, HASHES)

    assert (view.num_queued_tokens, view.num_sequences) == (100, 1)
    assert view.num_booked_blocks(HASHES[:2]) == 2


def test_a_booking_is_load_until_two_steps_have_been_reported(view: ReplicaView) -> None:
    view.book("r", 100, HASHES)

    view.apply_load(NO_LOAD)
    assert view.num_queued_tokens == 100
    view.apply_load(msgspec.structs.replace(NO_LOAD, num_queued_tokens=60, num_running=1))

    assert (view.num_queued_tokens, view.num_sequences) == (60, 1)


def test_booked_blocks_are_on_their_way_until_the_first_output(view: ReplicaView) -> None:
    view.book("r", 100, HASHES)
    for _ in range(5):
        view.apply_load(NO_LOAD)
    assert (view.num_booked, view.num_booked_blocks(HASHES)) == (1, 4)
    assert view.is_prefilling

    view.settle("r")

    assert (view.num_booked, view.num_booked_blocks(HASHES)) == (0, 0)
    assert not view.is_prefilling


def test_siblings_share_booked_blocks_until_the_last_is_settled(view: ReplicaView) -> None:
    view.book("r", 64, HASHES)
    view.book("s", 0, HASHES[:2])

    view.settle("r")
    view.settle("r")

    assert view.num_booked_blocks(HASHES) == 2


def test_what_comes_for_others_counts_as_blocks_and_not_as_load(view: ReplicaView) -> None:
    view.note_coming(1, [b"a", b"b"])
    view.book("mine", 32, [b"a"])

    assert view.num_booked_blocks([b"a", b"b", b"c"]) == 2
    assert view.num_queued_tokens == 32
    view.note_arrived(1)
    view.note_arrived(1)

    assert view.num_booked_blocks([b"a", b"b"]) == 1
    view.check()


def test_what_comes_for_others_is_bounded(view: ReplicaView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_view, "MAX_COMING_HASHES", 2)
    view.note_coming(1, [b"a", b"b"])
    view.note_coming(2, [b"c"])

    assert view.num_booked_blocks([b"c"]) == 0
    view.note_arrived(1)
    view.note_coming(3, [b"c"])

    assert view.num_booked_blocks([b"c"]) == 1
    view.check()


def test_booking_an_id_again_replaces_the_first(view: ReplicaView) -> None:
    view.book("r", 64, HASHES)
    view.book("r", 32, HASHES[:1])

    assert view.num_queued_tokens == 32
    view.clear_bookings()
    assert view.num_queued_tokens == 0


def test_room_is_a_free_seat_and_no_more_prompt_tokens_than_the_next_steps_take() -> None:
    view = ReplicaView("a", ReplicaShape(max_num_seqs=4, max_num_batched_tokens=100))

    def load(**fields: int) -> bool:
        view.apply_load(msgspec.structs.replace(NO_LOAD, **fields))
        return view.has_room

    assert load(num_running=3)
    assert load(num_running=4)  # the one that comes is the first to wait
    assert not load(num_running=4, num_waiting=1)
    assert load(num_running=1, num_waiting=2)  # those are taken up at the next step
    assert not load(num_running=1, num_waiting=2, num_queued_tokens=200)
