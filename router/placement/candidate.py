"""A replica as a place for one request, and how soon the request could start there.

Pure functions of a replica's reported load, this router's own bookings and the cost model that the replica
itself fits; tuples, since they are made anew for each request and replica. Nothing here says which replica is
best: that is a policy's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from router.placement.prefix_index import PrefixIndex
from router.placement.replica_view import ReplicaView

KEY_BLOCKS = 4
"""Leading blocks that siblings must share to gather while nothing is cached (64 tokens)."""
EXPECTED_OUTPUT_TOKENS = 128
"""Length after which a running request is guessed to free its seat and its blocks."""


class Candidate(NamedTuple):
    """A replica as a place for one request."""

    view: ReplicaView
    num_hit_tokens: int
    """Tokens of the request that the replica holds, or is about to."""


class Ranked(NamedTuple):
    """A candidate with its predicted cost; the first of a ranking is the choice."""

    candidate: Candidate
    cost_s: float


class Forecast(NamedTuple):
    """When a candidate could sample the request's next token, in two parts."""

    wait_s: float
    """Until the replica has done what is ahead and has a seat and blocks."""
    work_s: float
    """To compute the request's own uncached tokens, with the decodes that run beside them."""

    @property
    def start_s(self) -> float:
        """Until the request's next token."""
        return self.wait_s + self.work_s


def make_candidate(
    view: ReplicaView, index: PrefixIndex, index_key: str, hashes: Sequence[bytes], num_tokens: int
) -> Candidate:
    """Look up what a replica holds, or will hold once it has answered this router's own requests.

    Args:
        view: the replica.
        index: blocks by replica.
        index_key: the replica's name in ``index``.
        hashes: the request's full blocks, as this kind of replica hashes them.
        num_tokens: the request's known tokens.
    """
    num_blocks = max(index.match(index_key, hashes), view.num_booked_blocks(hashes))
    return Candidate(view, min(num_blocks * view.shape.block_size, num_tokens))


def forecast(candidate: Candidate, num_tokens: int) -> Forecast:
    """Predict when ``candidate`` could sample the next token of a request of ``num_tokens`` known tokens."""
    view = candidate.view
    load, shape, cost = view.load, view.shape, view.load.cost
    budget = max(1, shape.max_num_batched_tokens)
    num_queued, num_sequences = view.num_queued_tokens, view.num_sequences
    num_uncached = max(1, num_tokens - candidate.num_hit_tokens)
    step_s = cost.step_s(min(num_sequences, shape.max_num_seqs), 0, load.num_context_tokens)
    # Steps are packed: the request shares the last one of those before it.
    num_steps_before = num_queued // budget
    num_steps = -(-(num_queued + num_uncached) // budget)
    wait_s = cost.prefill_s(num_queued) + num_steps_before * step_s
    work_s = cost.prefill_s(num_uncached) + (num_steps - num_steps_before) * step_s
    # What the batch lacks, seats or blocks, comes back as running requests end.
    share = (num_sequences + 1 - shape.max_num_seqs) / max(1, shape.max_num_seqs)
    if load.num_blocks:
        num_blocks = (num_queued + num_uncached) // shape.block_size
        share = max(share, (num_blocks - load.num_free_blocks) / load.num_blocks)
    if share > 0:
        wait_s += share * step_s * EXPECTED_OUTPUT_TOKENS
    return Forecast(wait_s, work_s)


def start_s(candidate: Candidate, num_tokens: int) -> float:
    """Predicted seconds until ``candidate`` could sample the request's next token."""
    return forecast(candidate, num_tokens).start_s


def sibling_key(hashes: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """Equal for prompts that begin alike; of a prompt shorter than a block, its tokens."""
    if hashes:
        return hashes[min(len(hashes), KEY_BLOCKS) - 1]
    return blake2b(repr(token_ids).encode(), digest_size=16).digest()


def session_key(session: str) -> bytes:
    """Equal for requests of one session, whatever they say."""
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16, person=b"session").digest()


def rendezvous(key: bytes, replica_id: str) -> bytes:
    """Weight of a replica for a key; the greatest wins, and stays so when others come and go.

    Thaler & Ravishankar 1998, "Using name-based mappings to increase hit rates".
    """
    return blake2b(key + replica_id.encode(), digest_size=8).digest()
