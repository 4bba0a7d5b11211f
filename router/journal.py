"""What the ingress keeps of each engine request, so that another replica can go on with it.

A request goes on as its prompt plus the output tokens so far, with the same seed and parameters: a token's
random number depends on (seed, choice index, position) alone, so the rest is what it would have been.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from itertools import pairwise

from router.explanation import Placement
from router.placement.replica_view import ReplicaShape
from workers.engine.block_hash import hash_block, hash_blocks
from workers.engine.request import ChoiceParams, EngineRequest


class Loss(Enum):
    """How a request lost its replica."""

    BROKEN = "the replica died or stalled, perhaps because of the request"
    CUT_OFF = "the replica let it go on purpose, at the end of a drain"
    TARGET_GONE = "it had left the queue for another replica, which took no more when it came"


@dataclass(frozen=True, slots=True)
class PromptTerms:
    """How a prompt is treated, whatever it says."""

    keep_last: int | None = None
    """Only so many of its tokens count, the last ones."""
    cache_salt: str = ""
    """Its blocks are shared with prompts of the same salt alone."""
    priority: int = 0
    """Lower is served first, under the priority policy."""
    tenant: str = ""
    """Who shares with whom, under the fair policy."""
    has_output: bool = True
    """False: only a vector is wanted, so that the prompt may fill the context."""
    session: str = ""
    """Requests of one session gather at one replica among those that would do as well."""

    def within(self, tenant: str, cache_salt: str, priority: int) -> PromptTerms:
        """The same under a caller's own name, salt and priority, which a request can narrow and not leave.

        Equal salts of requests under different callers' salts are different salts; a request can wait longer than
        its caller must, not shorter.
        """
        if not cache_salt and not priority:
            return replace(self, tenant=tenant)
        salt = json.dumps([cache_salt, self.cache_salt]) if cache_salt else self.cache_salt
        return replace(self, tenant=tenant, cache_salt=salt, priority=priority + max(0, self.priority))


PLAIN_TERMS = PromptTerms()
POOLED_TERMS = PromptTerms(has_output=False)


class Prompt:
    """Token ids of one prompt, shared by its choices; its blocks are hashed once for each kind of replica."""

    __slots__ = ("_hashes", "terms", "token_ids")

    def __init__(self, token_ids: list[int], terms: PromptTerms = PLAIN_TERMS) -> None:
        self.token_ids = token_ids if terms.keep_last is None else token_ids[-terms.keep_last :]
        self.terms = terms
        self._hashes: dict[tuple[bytes, int], list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def root(self, shape: ReplicaShape) -> bytes:
        """Where its chain of hashes begins: the replica's own root, unless it has a salt."""
        salt = self.terms.cache_salt
        return blake2b(shape.hash_root, digest_size=16, key=_key(salt)).digest() if salt else shape.hash_root

    def hashes(self, shape: ReplicaShape) -> list[bytes]:
        """Chained hashes of the full blocks, as replicas of this shape register them."""
        root = self.root(shape)
        key = (root, shape.block_size)
        found = self._hashes.get(key)
        if found is None:
            found = self._hashes[key] = hash_blocks(self.token_ids, shape.block_size, root)
        return found

    def hashed(self) -> tuple[int, list[bytes]] | None:
        """Block size and hashes for some kind of replica that it was hashed for; None before it was."""
        for (_, block_size), hashes in self._hashes.items():
            return block_size, hashes
        return None


class Journal:
    """The record of one engine request: all of its tokens, and where it has been."""

    __slots__ = (
        "_attempt",
        "_num_tokens_at_loss",
        "lost_on",
        "num_charged_tokens",
        "num_suspect_losses",
        "output_token_ids",
        "params",
        "placements",
        "prompt",
        "replica_id",
        "request_id",
    )

    def __init__(self, request_id: str, prompt: Prompt, params: ChoiceParams) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.output_token_ids: list[int] = []
        self.replica_id = ""
        """Where it is, or was last; empty before the first placement."""
        self.lost_on: list[str] = []
        """Replicas that broke under it, in order."""
        self.num_suspect_losses = 0
        """Replicas that broke under it in a row without a new token of its own: what kills a replica does so in
        its first step there, what gets ahead is a bystander, however many replicas it outlives."""
        self.num_charged_tokens = 0
        """Output tokens that its caller has been charged for (``router.tenancy.fair_line``)."""
        self.placements: list[Placement] = []
        """Where it was sent, and why, in order."""
        self._attempt = 0
        self._num_tokens_at_loss = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return len(self.prompt) + len(self.output_token_ids)

    @property
    def longest(self) -> int:
        """Tokens at its end, should it take all that it may."""
        return len(self.prompt) + (self.params.max_tokens if self.prompt.terms.has_output else 0)

    @property
    def engine_id(self) -> str:
        """Its id at the replica it is on now: a new one for each attempt, so that nothing late is mistaken."""
        return f"{self.request_id}.{self._attempt}" if self._attempt else self.request_id

    @property
    def next_engine_id(self) -> str:
        """Its id at the replica that it goes to next."""
        return f"{self.request_id}.{self._attempt + 1}"

    @property
    def moves(self) -> list[Placement]:
        """Placements by which it changed queues."""
        return [placement for placement in self.placements if placement.moved is not None]

    @property
    def num_migrations(self) -> int:
        """Times that it went on elsewhere after its replica was lost to it."""
        return max(0, len(self.placements) - 1 - len(self.moves))

    def waited_before_moving_s(self, first_s: float | None) -> float:
        """In the queues that it left before its first token, which came at ``first_s``.

        Where it waits after that, its replica having been lost, its next token is late.
        """
        pairs = pairwise(self.placements)
        left = [(before, after) for before, after in pairs if after.moved is not None]
        return sum((b.at_s - a.at_s for a, b in left if first_s is None or b.at_s <= first_s), 0.0)

    @property
    def is_complete(self) -> bool:
        """True if all tokens asked for are here, though the replica's last word may be missing."""
        return len(self.output_token_ids) >= self.params.max_tokens

    @property
    def is_resumed(self) -> bool:
        """True if it has been at a replica before: it was admitted once."""
        return self._attempt > 0

    def note_loss(self, loss: Loss) -> None:
        """It is at no replica any more; one that broke is avoided, and held against the request."""
        if loss is Loss.BROKEN:
            self.lost_on.append(self.replica_id)
            has_progressed = self.num_tokens > self._num_tokens_at_loss
            self.num_suspect_losses = 1 if has_progressed else self.num_suspect_losses + 1
            self._num_tokens_at_loss = self.num_tokens
        if self.placements:
            self.placements[-1].lost = loss.value
        self._attempt += 1

    def note_move(self) -> None:
        """It has been taken back from its replica's queue, where nothing was computed for it."""
        self._attempt += 1

    def hashes(self, shape: ReplicaShape) -> list[bytes]:
        """Chained hashes of the full blocks of prompt and output so far."""
        hashes = self.prompt.hashes(shape)
        if not self.output_token_ids:
            return hashes
        size = shape.block_size
        rest = [*self.prompt.token_ids[len(hashes) * size :], *self.output_token_ids]
        longer = list(hashes)
        parent = hashes[-1] if hashes else self.prompt.root(shape)
        for start in range(0, len(rest) - size + 1, size):
            parent = hash_block(parent, rest[start : start + size])
            longer.append(parent)
        return longer

    def engine_request(self, shape: ReplicaShape, hashes: Sequence[bytes], arrival_s: float) -> EngineRequest:
        """What to submit to a replica of this shape to begin, or to go on."""
        return EngineRequest(
            request_id=self.engine_id,
            prompt_token_ids=self.prompt.token_ids,
            params=self.params,
            output_token_ids=list(self.output_token_ids),
            block_hashes=list(hashes),
            hash_root=self.prompt.root(shape),
            priority=self.prompt.terms.priority,
            tenant=self.prompt.terms.tenant,
            arrival_s=arrival_s,
        )


def _key(salt: str) -> bytes:
    """A key of BLAKE2b, which has at most 64 bytes."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
