"""One request inside the engine: its tokens, its place in the batch, its blocks.

The one rule of scheduling rests on two counts: tokens known and tokens computed. A token sampled by a step
whose result is still to come is known to exist, though not what it is (``num_in_flight``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from workers.engine.block_hash import hash_block
from workers.engine.policy import Turn
from workers.engine.request import EngineRequest

if TYPE_CHECKING:
    from workers.engine.beam_group import BeamGroup
    from workers.engine.constraint import Constraint

NO_ROW = -1


class Status(Enum):
    """Where a request stands; preempted ones wait again."""

    WAITING = auto()
    LOADING = auto()
    """Holds blocks whose contents are on their way from the host."""
    RUNNING = auto()
    HELD = auto()
    """A place among the beams of a search that has no beam now, or none yet."""
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a preempted request has on the host."""

    host_blocks: list[int]
    num_tokens: int
    """Whose KV they hold."""
    step_id: int
    """The plan with the last copies out; -1 if there were none."""


class RequestState:
    """Everything the engine knows about one request. Changed by scheduler and engine alone."""

    __slots__ = (
        "awaits_mask",
        "block_hashes",
        "block_ids",
        "claims",
        "constraint",
        "group",
        "is_promised",
        "last_step_id",
        "load_step_id",
        "max_len",
        "min_len",
        "num_attended_estimate",
        "num_cached_tokens",
        "num_computed",
        "num_host_cached_tokens",
        "num_in_flight",
        "num_known_at_start",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_reserved",
        "num_slots",
        "num_uncached_estimate",
        "payer",
        "queued_s",
        "reported",
        "request",
        "row",
        "status",
        "stop_token_ids",
        "swapped",
        "token_ids",
        "turn",
        "waited_s",
    )

    def __init__(
        self, request: EngineRequest, turn: Turn, max_len: int, eos_token_ids: Iterable[int], queued_s: float
    ) -> None:
        params = request.params
        self.request = request
        self.turn = turn
        """Place in every queue; lower is served first."""
        self.queued_s = queued_s
        self.waited_s: float | None = None
        self.status = Status.WAITING
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        """Tokens known: prompt, then output."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_len = max_len
        """Tokens known at which it ends."""
        self.min_len = self.num_prompt_tokens + params.min_tokens
        """Tokens known below which no stop token ends it."""
        self.stop_token_ids = frozenset(
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        )
        self.row = NO_ROW
        self.block_ids: list[int] = []
        self.block_hashes = list(request.block_hashes)
        self.num_slots = 0
        """Tokens that its blocks can hold: only those computed while it shares the last block with another."""
        self.num_computed = 0
        """Tokens whose KV is in the blocks once all launched steps have run."""
        self.num_in_flight = 0
        """Tokens sampled by launched steps and not yet told."""
        self.num_registered = 0
        """Leading blocks that have been offered to the prefix cache."""
        self.num_reserved = 0
        """Free blocks that are kept for it."""
        self.is_promised = False
        """True while all blocks that it can ever need are kept for it or its own."""
        self.payer: RequestState = self
        """Whose kept blocks it takes."""
        self.group: BeamGroup | None = None
        """The beams that it is one of."""
        self.load_step_id = -1
        """The last step whose plan copies into its blocks."""
        self.swapped: Swapped | None = None
        self.claims: list[bytes] = []
        """While waiting: blocks that it is the first to compute."""
        self.last_step_id = -1
        """The last step planned that touches its blocks."""
        self.num_cached_tokens = 0
        self.num_host_cached_tokens = 0
        self.num_known_at_start = 0
        """Tokens known when it last entered the batch."""
        self.num_uncached_estimate = 0
        """While waiting: tokens to compute, by the prefix cache as it was when it was queued."""
        self.num_attended_estimate = 0
        """Pairs of those tokens and the KV tokens that they read."""
        self.num_preemptions = 0
        self.reported = False
        self.constraint: Constraint | None = None
        """What limits its next token, besides its parameters."""
        self.awaits_mask = False
        """True while a step computes it whose sampling is deferred, or chooses among beams: it cannot be scheduled
        again before."""

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def num_rows(self) -> int:
        """Places in the batch that it takes, beams included."""
        return self.request.params.num_rows

    @property
    def has_begun(self) -> bool:
        """True once it has been in a batch, preempted since or not: something of it has been computed."""
        return self.waited_s is not None

    @property
    def is_finished(self) -> bool:
        """True once it has ended or was aborted."""
        return self.status is Status.FINISHED

    @property
    def num_lag(self) -> int:
        """Tokens that exist and are not computed; 1 means that it decodes."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, here or elsewhere."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_exhausted(self) -> bool:
        """True once no further token may be sampled, counting those in flight."""
        return len(self.token_ids) + self.num_in_flight >= self.max_len

    def stops_at(self, token_id: int) -> bool:
        """True if ``token_id``, the last one known, ends it."""
        return token_id in self.stop_token_ids and len(self.token_ids) >= self.min_len

    def hash_at(self, index: int, block_size: int, root: bytes) -> bytes:
        """Chained hash of full block ``index``, whose tokens must all be known."""
        hashes = self.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else (self.request.hash_root or root)
            hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return hashes[index]
