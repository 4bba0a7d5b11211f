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
    num_host_tokens: int = 0
    """Of those, the last ones: in its host memory, to be copied back before they are of use."""


class Ahead(NamedTuple):
    """What a replica does before a request's turn."""

    num_queued_tokens: int
    """Uncached prompt tokens."""
    num_attended: int
    """Pairs of those and the KV tokens that they read."""
    num_sequences: int
    """Requests that run or wait."""


class Forecast(NamedTuple):
    """When a candidate could sample the request's next token, in parts that follow each other."""

    wait_s: float
    """Until the replica has done what is ahead and has a seat and blocks."""
    copy_s: float
    """To bring blocks back from host memory; the replica computes for others meanwhile."""
    work_s: float
    """To compute the request's own uncached tokens, with the decodes that run beside them."""

    @property
    def start_s(self) -> float:
        """Until the request's next token."""
        return self.wait_s + self.copy_s + self.work_s


class Ranked(NamedTuple):
    """A candidate with its predicted cost; the first of a ranking is the choice."""

    candidate: Candidate
    cost_s: float
    forecast: Forecast


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
    num_device, num_host = index.match(index_key, hashes)
    num_on_device = max(num_device, view.num_booked_blocks(hashes))
    size = view.shape.block_size
    num_device_tokens = min(num_on_device * size, num_tokens)
    num_hit_tokens = min(max(num_on_device, num_device + num_host) * size, num_tokens)
    return Candidate(view, num_hit_tokens, num_hit_tokens - num_device_tokens)


def forecast(candidate: Candidate, num_tokens: int, ahead: Ahead | None = None) -> Forecast:
    """Predict when ``candidate`` could sample the next token of a request of ``num_tokens`` known tokens.

    Blocks in host memory are copied back where the replica would do so: where computing them takes longer.
    ``ahead`` is what comes before a request that waits there; None: the request is new, and all that is there does.
    """
    view, num_hit, num_host = candidate
    load, shape, cost = view.load, view.shape, view.load.cost
    copy_s = 0.0
    if num_host:
        copy_s = cost.copy_s(num_host // shape.block_size)
        if copy_s >= cost.prefill_s(num_host, num_hit - num_host):
            num_hit, copy_s = num_hit - num_host, 0.0
    budget = max(1, shape.max_num_batched_tokens)
    if ahead is None:
        num_queued, num_sequences, queued_s = view.num_queued_tokens, view.num_sequences, view.queued_work_s
    else:
        num_queued, num_sequences = ahead.num_queued_tokens, ahead.num_sequences
        queued_s = cost.queue_s(num_queued, ahead.num_attended)
    num_uncached = max(1, num_tokens - num_hit)
    step_s = cost.step_s(min(num_sequences, shape.max_num_seqs), 0, load.num_context_tokens)
    # Steps are packed: the request shares the last one of those before it.
    num_steps_before = num_queued // budget
    num_steps = -(-(num_queued + num_uncached) // budget)
    wait_s = queued_s + num_steps_before * step_s
    work_s = cost.prefill_s(num_uncached, num_tokens - num_uncached)
    work_s += (num_steps - num_steps_before) * step_s
    # What the batch lacks, seats or blocks, comes back as running requests end.
    share = (num_sequences + 1 - shape.max_num_seqs) / max(1, shape.max_num_seqs)
    if load.num_blocks:
        num_copied = num_host if copy_s else 0
        num_blocks = (num_queued + num_uncached + num_copied) // shape.block_size
        share = max(share, (num_blocks - load.num_free_blocks) / load.num_blocks)
    if share > 0:
        wait_s += share * step_s * EXPECTED_OUTPUT_TOKENS
    return Forecast(wait_s, copy_s, work_s)


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
