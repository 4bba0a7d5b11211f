"""Sums by copies: whatever two ranks' streams do first, no rows are overwritten before they have been added.

Streams and signals are imitated: what the host asks for is queued, and run later in an order drawn at random. A step of
a queue can be taken once what it waits for has happened, as on a device.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.model import peer_copies
from workers.model.peer_copies import MAX_UNDER_WAY, PeerCopies

WIDTH, MAX_ROWS = 2, 3


class Stream:
    """Work in order; an item returns False as long as it cannot be done."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def add(self, item: Callable[[], bool]) -> None:
        self.queue.append(item)

    def record_event(self) -> list[bool]:
        happened: list[bool] = []
        self.add(lambda: happened.append(True) or True)
        return happened

    def wait_event(self, event: list[bool]) -> None:
        self.add(lambda: bool(event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Device:
    """Stands for ``torch.cuda`` and the kernel of one rank at a time: the one whose host is at work."""

    def __init__(self) -> None:
        self.streams = [[Stream()], [Stream()]]
        self.signals: dict[tuple[int, int, int], bool] = {}
        self.at_work: list[Stream] = []
        self.rank = 0

    def make_stream(self) -> Stream:
        self.streams[self.rank].append(Stream())
        return self.streams[self.rank][-1]

    def current_stream(self) -> Stream:
        return self.at_work[-1] if self.at_work else self.streams[self.rank][0]

    @contextmanager
    def stream(self, stream: Stream):
        self.at_work.append(stream)
        yield
        self.at_work.pop()

    def add_rows(self, x, other, residual, weight, eps):  # in place of kernels.rms_norm.add_two_rms_norm
        out = torch.zeros_like(x)
        self.current_stream().add(lambda: out.copy_(x + other) is not None)
        return out


class Handle:
    """One rank's view of memory and signals, as torch's symmetric memory gives it."""

    def __init__(self, device: Device, rank: int, places: list[torch.Tensor]) -> None:
        self.device, self.rank, self.places = device, rank, places

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.places[rank].view(shape)

    def put_signal(self, peer: int, channel: int) -> None:
        self.device.current_stream().add(lambda: self._flip((self.rank, peer, channel), False))

    def wait_signal(self, peer: int, channel: int) -> None:
        self.device.current_stream().add(lambda: self._flip((peer, self.rank, channel), True))

    def _flip(self, signal: tuple[int, int, int], is_set: bool) -> bool:
        if self.device.signals.get(signal, False) is not is_set:
            return False
        self.device.signals[signal] = not is_set
        return True


class LaterCopies(PeerCopies):
    """Copies when the stream comes to it."""

    def send(self, x: torch.Tensor, place: int) -> None:
        target = self._theirs[place, : x.shape[0]]
        peer_copies.torch.cuda.current_stream().add(lambda: target.copy_(x) is not None)


def open_pair(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[LaterCopies]:
    cuda = SimpleNamespace(
        Stream=device.make_stream, current_stream=device.current_stream, stream=device.stream
    )
    monkeypatch.setattr(peer_copies, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peer_copies, "add_two_rms_norm", device.add_rows)
    places = [torch.zeros(2 * MAX_UNDER_WAY * MAX_ROWS * WIDTH) for _ in range(2)]
    pair = []
    for rank in range(2):
        device.rank = rank
        memory = SimpleNamespace(handle=Handle(device, rank, places))
        pair.append(LaterCopies(rank, memory, MAX_ROWS, WIDTH, torch.float32))
    return pair


def run_all(device: Device, rng: random.Random) -> None:
    """Take steps of all streams until none is left, the first in some order that can go on; a deadlock fails.

    The order changes now and then, so that a stream may be far behind all others.
    """
    streams = [stream for both in device.streams for stream in both]
    while any(stream.queue for stream in streams):
        if rng.random() < 0.05:
            rng.shuffle(streams)
        for stream in streams:
            if stream.queue and stream.queue[0]():
                stream.queue.popleft()
                break
        else:
            pytest.fail("all streams wait for each other")


def add_all(plan: list[bool], counts: list[int], seed: int) -> None:
    """Start a sum for each True, await the oldest for each False, where that can be; compare at the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = Device()
        pair = open_pair(device, monkeypatch)
        found: list[list[torch.Tensor]] = [[], []]
        wanted: list[torch.Tensor] = []
        under_way: list[deque[Callable[[], torch.Tensor]]] = [deque(), deque()]
        for is_start in [*plan, *[False] * MAX_UNDER_WAY]:
            if is_start and len(under_way[0]) < MAX_UNDER_WAY:
                count, number = counts[len(wanted) % len(counts)], len(wanted) + 1
                parts = [torch.full((count, WIDTH), number * 10.0**rank) for rank in range(2)]
                wanted.append(parts[0] + parts[1])
                for device.rank in range(2):
                    rows = parts[device.rank]
                    under_way[device.rank].append(pair[device.rank].start(rows, rows, rows, 0.0))
            elif under_way[0]:
                for device.rank in range(2):
                    found[device.rank].append(under_way[device.rank].popleft()())
        run_all(device, random.Random(seed))

        for rank in range(2):
            assert [one.tolist() for one in found[rank]] == [one.tolist() for one in wanted]


@settings(max_examples=40, deadline=None)
@given(
    plan=st.lists(st.booleans(), max_size=40),
    counts=st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_sums_are_right_in_whatever_order_streams_run(plan: list[bool], counts: list[int], seed: int) -> None:
    add_all(plan, counts, seed)


@pytest.mark.parametrize("seed", range(30))
def test_no_place_is_written_before_it_has_been_read(seed: int) -> None:
    add_all([True, True, False, False] * 8, [MAX_ROWS], seed)


def test_more_sums_than_there_are_places_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = open_pair(Device(), monkeypatch)
    rows = torch.ones(1, WIDTH)
    for _ in range(MAX_UNDER_WAY):
        pair[0].start(rows, rows, rows, 0.0)

    with pytest.raises(AssertionError, match="before it has been read"):
        pair[0].start(rows, rows, rows, 0.0)
