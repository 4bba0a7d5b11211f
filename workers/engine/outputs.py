"""What the engine tells the world after a step: new tokens, its load, changes of its prefix cache."""

from __future__ import annotations

import msgspec

from workers.engine.cost_model import CostModel
from workers.engine.plan import TokenLogprobs
from workers.engine.request import FinishReason


class BeamOutput(msgspec.Struct, frozen=True, array_like=True):
    """One of the outputs that a beam search has found."""

    token_ids: list[int]
    """The token that ended it included."""
    logprob: float
    """Of all of them together."""
    score: float
    """By which outputs are ranked: see ``BeamParams``."""
    finish_reason: FinishReason
    stop_token_id: int | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, usually one."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended it; it is the last of ``token_ids``, unless that was
    generated elsewhere."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; set in the first output only."""
    num_preemptions: int = 0
    error: str | None = None
    """With finish reason ``error``: what went wrong."""
    error_param: str | None = None
    """With an ``error`` that is the caller's mistake: the field at fault."""
    is_user_error: bool = False
    waited_s: float | None = None
    """From taking up to the first step planned; set in the first output only."""
    pooled: bytes | None = None
    """The vector that ``ChoiceParams.pooling`` asked for, float32 little-endian."""
    num_host_cached_tokens: int = 0
    """Of ``num_cached_tokens``, brought back from the host."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on; set in the first output only, where asked for."""
    beams: list[BeamOutput] | None = None
    """What a beam search has found, best first; its one output has no ``token_ids`` of its own."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is, after a step."""

    num_running: int
    num_waiting: int
    num_queued_tokens: int
    """Known tokens not yet computed and not found in the cache: prefill work that is ahead, launched steps included."""
    num_free_blocks: int
    """Blocks that can be taken at once, cached but unreferenced ones included."""
    num_blocks: int
    num_context_tokens: int
    """KV tokens held by running requests."""
    kv_waste: float
    """Share of allocated slots that hold no token."""
    num_preemptions: int
    """Since start."""
    num_steps: int
    """Since start."""
    num_prompt_tokens: int
    """Since start, of admitted requests."""
    num_cached_tokens: int
    """Since start, of ``num_prompt_tokens``."""
    num_output_tokens: int
    """Since start."""
    cost: CostModel
    num_swap_preemptions: int = 0
    """Since start, of ``num_preemptions``: those whose blocks went to the host."""
    num_blocks_swapped_out: int = 0
    """Since start, cold cached blocks included."""
    num_blocks_swapped_in: int = 0
    """Since start."""
    num_corrupt_blocks: int = 0
    """Since start: copies from the host that did not find what had been copied there."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    num_free_host_blocks: int = 0
    """Of those, without a holder; they may still be found."""
    num_host_cached_tokens: int = 0
    """Since start, of ``num_cached_tokens``: brought back from the host."""
    num_forked_blocks: int = 0
    """Since start: blocks that choices and beams have shared by forking, where each would have computed its own."""
    num_tail_copies: int = 0
    """Since start: shared blocks that were copied since one of those that share them wrote to it."""
    step_error_p50: float = 0.0
    """Median error of the cost model over the last hundred steps, relative to what they took."""
    num_queued_attended: int = 0
    """Pairs of a queued token and a KV token that it will read."""

    @property
    def queued_work_s(self) -> float:
        """Seconds of prefill work that is ahead."""
        return self.cost.queue_s(self.num_queued_tokens, self.num_queued_attended)


class Queued(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stands that waits and has not begun."""

    request_id: str
    num_uncached_tokens: int
    """That it will have to compute, as far as can be told."""
    num_tokens_ahead: int
    """Known tokens to be computed before it: of those that have begun, and of those whose turn comes sooner."""
    num_attended_ahead: int
    """Pairs of those tokens and the KV tokens that they will read."""
    num_requests_ahead: int
    """Running and waiting ones."""


class CacheEvents(msgspec.Struct, frozen=True, array_like=True):
    """Net changes of the prefix cache since the last message: apply ``stored``, then ``offloaded``, then ``evicted``.

    No hash stands in two of them.
    """

    first_sequence: int
    """Number of the first event; numbers are consecutive over messages, so a gap is seen."""
    stored: list[bytes]
    """Now on the device."""
    evicted: list[bytes]
    """Now nowhere."""
    offloaded: list[bytes] = []
    """Now on the host alone."""

    @property
    def num_events(self) -> int:
        """How many numbers the message takes."""
        return len(self.stored) + len(self.offloaded) + len(self.evicted)


class CacheSnapshot(msgspec.Struct, frozen=True, tag="cache_snapshot"):
    """All hashes in the cache; the next event has number ``next_sequence``."""

    next_sequence: int
    hashes: list[bytes]
    """On the device."""
    host_hashes: list[bytes] = []
    """On the host alone."""
