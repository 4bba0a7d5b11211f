"""A slow reader costs memory by the token, never order or content."""

from __future__ import annotations

import asyncio

import pytest

from cluster.outbox import MAX_WAITING_MESSAGES, Outbox, OutboxFull
from cluster.proto import shoal_pb2 as pb


def output(token_id: int) -> pb.TokenOutput:
    return pb.TokenOutput(request_id="a", token_ids=[token_id])


def events(first: int) -> pb.CacheEvents:
    return pb.CacheEvents(first_sequence=first, stored=b"x" * 16)


async def test_steps_that_wait_become_one_message() -> None:
    outbox = Outbox()

    for token_id in range(100):
        outbox.put_step([output(token_id)], None, pb.Load(num_steps=token_id))

    message = await outbox.get()
    assert message is not None
    assert [one.token_ids[0] for one in message.step.outputs] == list(range(100))
    assert message.step.load.num_steps == 99
    assert len(outbox) == 0


async def test_two_sets_of_cache_events_stay_apart_and_in_order() -> None:
    outbox = Outbox()

    outbox.put_step([output(1)], events(0), pb.Load())
    outbox.put_step([output(2)], None, pb.Load())
    outbox.put_step([output(3)], events(1), pb.Load())
    outbox.close()

    seen = []
    while (message := await outbox.get()) is not None:
        seen.append((message.step.cache.first_sequence, [one.token_ids[0] for one in message.step.outputs]))
    assert seen == [(0, [1, 2]), (1, [3])]


async def test_a_step_is_never_merged_over_another_message() -> None:
    outbox = Outbox()

    outbox.put_step([output(1)], None, pb.Load())
    outbox.put(pb.ReplicaMessage(snapshot=pb.CacheSnapshot(next_sequence=1)))
    outbox.put_step([output(2)], None, pb.Load())

    kinds = [(await outbox.get()).WhichOneof("kind") for _ in range(3)]  # type: ignore[union-attr]
    assert kinds == ["step", "snapshot", "step"]


async def test_a_waiting_reader_is_woken_by_close() -> None:
    outbox = Outbox()
    reader = asyncio.ensure_future(outbox.get())

    await asyncio.sleep(0)
    outbox.close()

    assert await reader is None


def test_a_reader_too_far_behind_is_found_out() -> None:
    outbox = Outbox()
    for number in range(MAX_WAITING_MESSAGES):
        outbox.put_step([], events(number), pb.Load())

    with pytest.raises(OutboxFull):
        outbox.put_step([], events(MAX_WAITING_MESSAGES), pb.Load())
