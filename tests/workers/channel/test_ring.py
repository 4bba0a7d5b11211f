from __future__ import annotations

import os
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.channel.ring import RingReader, RingWriter, new_counter, new_memory

payloads = st.lists(st.binary(min_size=1, max_size=100), max_size=12)


@given(
    payloads=payloads, num_readers=st.integers(1, 3), eager=st.lists(st.booleans(), min_size=12, max_size=12)
)
@settings(max_examples=150, deadline=None)
def test_every_reader_reads_every_message_however_small_the_ring(
    payloads: list[bytes], num_readers: int, eager: list[bool]
) -> None:
    memory_fd = new_memory(16)
    doorbells = [new_counter() for _ in range(num_readers)]
    credits = [new_counter() for _ in range(num_readers)]
    readers = [RingReader(memory_fd, *counters) for counters in zip(doorbells, credits, strict=True)]
    heard: list[list[bytes]] = [[] for _ in readers]

    def read_all() -> None:
        for reader, messages in zip(readers, heard, strict=True):
            while (message := reader.read()) is not None:
                messages.append(message)

    with closing(RingWriter(memory_fd, doorbells, credits)) as writer:
        for payload, reads_now in zip(payloads, eager, strict=False):
            writer.write(payload, wait=read_all)
            if reads_now:
                read_all()
        read_all()

    assert heard == [payloads] * num_readers
    for reader in readers:
        reader.close()
    for fd in (memory_fd, *doorbells, *credits):
        os.close(fd)


def test_a_message_that_has_come_in_part_is_not_read_yet() -> None:
    memory_fd, doorbell, credit = new_memory(16), new_counter(), new_counter()
    reader = RingReader(memory_fd, doorbell, credit)
    seen: list[bytes | None] = []

    with closing(RingWriter(memory_fd, [doorbell], [credit])) as writer:
        writer.write(b"x" * 40, wait=lambda: seen.append(reader.read()))

    assert seen == [None, None]
    assert reader.read() == b"x" * 40
    reader.close()
    for fd in (memory_fd, doorbell, credit):
        os.close(fd)
