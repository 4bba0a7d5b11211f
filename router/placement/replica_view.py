"""What the router believes about one replica: its last reported load and this router's own bookings.

Pure state; whoever owns the stream tells it what arrived. A booking stands for a request that was sent and
not answered yet, so that a burst of requests sees itself. It counts as load until the replica's own figures
must show it, and as blocks that the replica is about to hold until its first output: then they are cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workers.brain_messages import Load
from workers.engine.cost_model import CostModel, attended

STEPS_TO_SETTLE = 2
"""Step messages after which a request shows in the load: one may have been under way when it was sent."""


ROOM_STEPS = 2
"""Full steps of prompt tokens that may queue where more requests could come: one runs, one is planned ahead."""
ROOM_SEATS_SHARE = 64
"""Where all seats are taken, for one in so many a request may wait: about as many end within a step."""

MAX_COMING_HASHES = 65_536
"""Blocks of others' waiting requests that are kept of a replica, some 10 MB; those of further ones are ignored."""


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a replica says of itself when a stream opens; fixed until the stream ends."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    num_blocks: int = 0
    max_model_len: int = 0
    hash_root: bytes = b""

    def holds(self, num_tokens: int) -> bool:
        """True if a request may become so long; a replica that does not say its limit has none."""
        return not self.max_model_len or num_tokens <= self.max_model_len


NO_LOAD = Load(
    num_running=0,
    num_waiting=0,
    num_queued_tokens=0,
    num_free_blocks=0,
    num_blocks=0,
    num_context_tokens=0,
    kv_waste=0.0,
    num_preemptions=0,
    num_steps=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_output_tokens=0,
    cost=CostModel(),
)
"""What is assumed of a replica before its first step."""


class Predicted(NamedTuple):
    """What was expected of a request when it was sent."""

    at_s: float
    """Of sending, on the caller's clock."""
    start_s: float
    """From then until its first output."""


@dataclass(slots=True)
class _Booking:
    num_uncached_tokens: int
    num_attended: int
    hashes: Sequence[bytes]
    predicted: Predicted | None = None
    steps_left: int = STEPS_TO_SETTLE
    """Until the load shows it."""


class ReplicaView:
    """Load and bookings of one replica. A booking is reserved when a replica is chosen, not when it answers."""

    def __init__(self, replica_id: str, shape: ReplicaShape) -> None:
        self.replica_id = replica_id
        self.shape = shape
        self.load = NO_LOAD
        self.is_open = True
        """False: no new placements (it drains, is lost, or has left)."""
        self._bookings: dict[str, _Booking] = {}
        self._unseen: dict[str, _Booking] = {}
        """Of the bookings, those that the load does not show."""
        self._unseen_tokens = 0
        self._unseen_attended = 0
        self._booked_hashes: Counter[bytes] = Counter()
        """Of own bookings and of what is coming for others."""
        self._coming: dict[int | str, Sequence[bytes]] = {}
        """Blocks of requests that other routers sent there and that have had no output yet."""
        self._num_coming_hashes = 0

    @property
    def num_coming_hashes(self) -> int:
        """Blocks of others' requests that are kept."""
        return self._num_coming_hashes

    @property
    def num_booked(self) -> int:
        """Requests sent that have had no output yet."""
        return len(self._bookings)

    @property
    def num_queued_tokens(self) -> int:
        """Uncached prompt tokens that are ahead of a new request: reported and booked."""
        return self.load.num_queued_tokens + self._unseen_tokens

    @property
    def queued_work_s(self) -> float:
        """Seconds of prefill work ahead of a new request: reported and booked."""
        load = self.load
        return load.cost.queue_s(self.num_queued_tokens, load.num_queued_attended + self._unseen_attended)

    @property
    def num_sequences(self) -> int:
        """Requests that run or wait there, own bookings included."""
        return self.load.num_running + self.load.num_waiting + len(self._unseen)

    @property
    def num_waiting(self) -> int:
        """Requests that wait there, own bookings included."""
        return self.load.num_waiting + len(self._unseen)

    @property
    def has_room(self) -> bool:
        """True while a further request would soon be computed there; beyond, it might as well wait elsewhere.

        What is queued keeps the replica busy until a word of its steps has come and an answer to it has gone back.
        """
        seats = self.shape.max_num_seqs
        has_seats = self.num_sequences < seats or self.num_waiting < max(1, seats // ROOM_SEATS_SHARE)
        return has_seats and self.num_queued_tokens < ROOM_STEPS * self.shape.max_num_batched_tokens

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens are being computed there, as far as can be told."""
        return self.num_queued_tokens > 0 or bool(self._bookings)

    def is_booked(self, request_id: str) -> bool:
        """True while a request that was sent has had no output."""
        return request_id in self._bookings

    def num_booked_blocks(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of the chain that the replica will hold once it has answered what is booked."""
        booked = self._booked_hashes
        if not booked:
            return 0
        count = 0
        for block_hash in hashes:
            if block_hash not in booked:
                break
            count += 1
        return count

    def book(
        self,
        request_id: str,
        num_uncached_tokens: int,
        hashes: Sequence[bytes],
        num_cached_tokens: int = 0,
        predicted: Predicted | None = None,
    ) -> None:
        """Reserve: count a request that is being sent.

        Args:
            request_id: its name.
            num_uncached_tokens: what will have to be computed of it.
            hashes: its full blocks.
            num_cached_tokens: what comes before, which the computed tokens read.
            predicted: what ``settle`` is to tell.
        """
        self.settle(request_id)
        num_attended = attended(num_uncached_tokens, num_cached_tokens)
        booking = _Booking(num_uncached_tokens, num_attended, hashes, predicted)
        self._bookings[request_id] = self._unseen[request_id] = booking
        self._unseen_tokens += num_uncached_tokens
        self._unseen_attended += num_attended
        self._booked_hashes.update(hashes)

    def settle(self, request_id: str) -> Predicted | None:
        """Drop a booking: the request has been answered, or is gone. Unknown ids are ignored.

        Returns what was predicted when it was booked, if anything was.
        """
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return None
        self._see(request_id)
        self._uncount(booking.hashes)
        return booking.predicted

    def note_coming(self, number: int | str, hashes: Sequence[bytes]) -> None:
        """Another router's request is there and will leave these blocks; the load shows what it costs."""
        self.note_arrived(number)
        if self._num_coming_hashes + len(hashes) > MAX_COMING_HASHES:
            return
        self._coming[number] = hashes
        self._num_coming_hashes += len(hashes)
        self._booked_hashes.update(hashes)

    def note_arrived(self, number: int | str) -> None:
        """It has had its first output, or is gone. Unknown numbers are ignored."""
        hashes = self._coming.pop(number, ())
        self._num_coming_hashes -= len(hashes)
        self._uncount(hashes)

    def apply_load(self, load: Load) -> None:
        """Take a step's load; requests that it must show by now are no longer added to it."""
        self.load = load
        if self._unseen:
            for booking in self._unseen.values():
                booking.steps_left -= 1
            for request_id in [r for r, booking in self._unseen.items() if booking.steps_left <= 0]:
                self._see(request_id)

    def clear_bookings(self) -> None:
        """Drop all bookings: the stream is gone, and its requests with it."""
        for request_id in list(self._bookings):
            self.settle(request_id)

    def check(self) -> None:
        """Raise ``AssertionError`` if the sums disagree with the bookings."""
        assert self._unseen.items() <= self._bookings.items(), "a request is unseen but not booked"
        assert self._unseen_tokens == sum(b.num_uncached_tokens for b in self._unseen.values())
        assert self._unseen_attended == sum(b.num_attended for b in self._unseen.values())
        hashes = Counter(h for booking in self._bookings.values() for h in booking.hashes)
        hashes.update(h for coming in self._coming.values() for h in coming)
        assert self._num_coming_hashes == sum(map(len, self._coming.values())), "coming blocks are miscounted"
        assert hashes == self._booked_hashes, "booked hashes are miscounted"

    def _uncount(self, hashes: Sequence[bytes]) -> None:
        counts = self._booked_hashes
        for block_hash in hashes:
            if counts[block_hash] <= 1:
                del counts[block_hash]
            else:
                counts[block_hash] -= 1

    def _see(self, request_id: str) -> None:
        """The load shows a request, or it is gone: stop adding it."""
        booking = self._unseen.pop(request_id, None)
        if booking is not None:
            self._unseen_tokens -= booking.num_uncached_tokens
            self._unseen_attended -= booking.num_attended
