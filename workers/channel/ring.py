"""A ring of bytes in shared memory: one writer, any number of readers, each of whom reads everything.

The cursors are eventfd counters and nothing else. The writer adds to each reader's *doorbell* the bytes it
has published, a reader adds to its *credit* the bytes it has consumed. The kernel orders the counters after
the bytes, so no memory barrier is needed on any processor, a waiting side sleeps in ``poll``, and a message
longer than the ring flows through it piece by piece.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

LENGTH_BYTES = 4


def new_counter() -> int:
    """An eventfd for a doorbell or a credit; closed on exec."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def new_memory(num_bytes: int) -> int:
    """A descriptor of anonymous shared memory, which vanishes with the last process that holds it."""
    fd = os.memfd_create("shoal-steps", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _take(counter: int) -> int:
    """Read and clear a counter; 0 if it is clear."""
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0


class RingWriter:
    """Publishes messages, each preceded by its length."""

    def __init__(self, memory_fd: int, doorbells: Sequence[int], credits: Sequence[int]) -> None:
        """Write to the memory behind ``memory_fd``, of which the ring keeps a mapping of its own.

        Args:
            doorbells: one counter for each reader.
            credits: one counter for each reader.
        """
        self._memory = mmap.mmap(memory_fd, 0)
        self._capacity = len(self._memory)
        self._doorbells = doorbells
        self._credits = credits
        self._written = 0
        self._consumed = [0] * len(doorbells)

    def write(self, payload: bytes, wait: Callable[[], None]) -> None:
        """Publish one message; wait for readers where it does not fit.

        Args:
            wait: called while the ring is full; returns when some credit may have come, raises to give up.
        """
        rest = memoryview(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        while rest:
            num_bytes = min(len(rest), self._room(len(rest)))
            if num_bytes == 0:
                wait()
                continue
            start = self._written % self._capacity
            until_end = min(num_bytes, self._capacity - start)
            self._memory[start : start + until_end] = rest[:until_end]
            self._memory[: num_bytes - until_end] = rest[until_end:num_bytes]
            self._written += num_bytes
            for doorbell in self._doorbells:
                os.eventfd_write(doorbell, num_bytes)
            rest = rest[num_bytes:]

    def close(self) -> None:
        """Unmap the memory; the counters belong to the caller."""
        self._memory.close()

    def _room(self, wanted: int) -> int:
        """Bytes that no reader still has to read; credits are looked at only if they matter."""
        room = self._capacity - (self._written - min(self._consumed))
        if room < wanted:
            self._consumed = [
                consumed + _take(credit)
                for consumed, credit in zip(self._consumed, self._credits, strict=True)
            ]
            room = self._capacity - (self._written - min(self._consumed))
        return room


class RingReader:
    """Reads messages in order."""

    def __init__(self, memory_fd: int, doorbell: int, credit: int) -> None:
        self._memory = mmap.mmap(memory_fd, 0)
        self._capacity = len(self._memory)
        self._doorbell = doorbell
        self._credit = credit
        self._read = 0
        self._buffer = bytearray()

    def read(self) -> bytes | None:
        """The next message, or None if it has not arrived whole. Never waits."""
        payload = self._pop()
        if payload is None and self.pull():
            payload = self._pop()
        return payload

    def pull(self) -> int:
        """Move what is published into a buffer of this process, which has no limit, and give the writer credit for it.

        Returns:
            How many bytes came.
        """
        num_bytes = _take(self._doorbell)
        if num_bytes:
            start = self._read % self._capacity
            until_end = min(num_bytes, self._capacity - start)
            self._buffer += self._memory[start : start + until_end]
            self._buffer += self._memory[: num_bytes - until_end]
            self._read += num_bytes
            os.eventfd_write(self._credit, num_bytes)
        return num_bytes

    def close(self) -> None:
        """Unmap the memory; the counters belong to the caller."""
        self._memory.close()

    def _pop(self) -> bytes | None:
        """Cut one whole message off the buffer."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "little")
        if len(buffer) < end:
            return None
        payload = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        return payload
