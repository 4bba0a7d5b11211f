"""The only traffic between the brain and its ranks: a plan down, a result up.

Plans are columnar and small: each rank keeps for every *row* (a place in the batch) the token ids, the
block table and the sampling parameters, and a plan says what changes. A sampled token is written by the
rank itself at its position in the row's tokens, where the next step reads it: it never travels back down,
which is what lets step N+1 be launched while N still runs.

Structs are encoded as msgpack arrays (msgspec); nothing here is ever pickled.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from workers.engine.request import ChoiceParams


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request that enters the batch at ``row``: fresh, or again after a preemption.

    Whatever the row held before is gone. Its block table is empty until ``StepPlan.new_block_ids`` fills
    it, prefix-hit blocks included.
    """

    row: int
    token_ids: list[int]
    """All tokens known to the brain: prompt, then output so far."""
    num_prompt_tokens: int
    params: ChoiceParams


class Branch(msgspec.Struct, frozen=True, array_like=True):
    """A row that goes on from another's tokens, or from its own: a beam that was chosen.

    It takes over leading tokens, leading blocks and parameters of ``source`` as they were before the plan, whatever
    other branches of the plan do to that row.
    """

    row: int
    source: int
    num_tokens: int
    token_id: int
    """That follows them, whatever was sampled there."""
    num_blocks: int


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """A new row whose tokens are those of ``source``: it computes nothing, and samples from what that row computes."""

    row: int
    source: int
    """A row of this plan that samples."""
    block_ids: list[int]
    """Its block table: the source's full blocks. What it writes to next comes with a later plan."""


class TailCopy(msgspec.Struct, frozen=True, array_like=True):
    """A block of the device that two rows share, copied before one of them writes to it."""

    source: int
    target: int


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """One block between the tiers, all layers of it."""

    device: int
    host: int
    generation: int
    """How often the host block has been written, this copy out included; a copy in must find the same number."""


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens one sampling row may take."""

    place: int
    """Of the row among the rows of its step that sample."""
    allowed: bytes
    """Token ``i`` is bit ``i % 8`` of byte ``i // 8``; tokens beyond its end are forbidden."""


class LateMasks(msgspec.Struct, frozen=True, array_like=True):
    """What the deferred rows of an earlier step have waited for; those without a mask here may take any token."""

    step_id: int
    masks: list[TokenMask]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: for ``rows[i]`` compute tokens ``starts[i] .. starts[i] + num_tokens[i]``.

    Scheduled rows come decodes first (``num_tokens == 1`` and sampling), then prefill chunks; where the engine replays
    outputs, rows that compute an output token first, then those that compute a prompt. All KV of a
    layer is written before that layer's attention reads any, so rows of one plan may share blocks that
    this very plan fills.

    Copies between the tiers begin once all earlier steps have run and may end at any time later: the brain neither
    reuses nor reads either end before a result has said that they are done, and says so in ``copies_awaited``. But the
    device block of a copy out may be written while it is read: then what arrives on the host is never used. A plan
    may have no rows, if it is there for copies or late masks alone.
    """

    step_id: int
    new_rows: list[NewRow]
    rows: list[int]
    starts: list[int]
    """Tokens of the row whose KV is already in its blocks, per scheduled row."""
    num_tokens: list[int]
    samples: list[bool]
    """True where the last token computed is the last one known: sample the next and store it at position
    ``start + num_tokens``."""
    new_block_ids: list[list[int]]
    """Appended to the row's block table before the step, per scheduled row."""
    swap_out: list[BlockCopy] = []
    """Device to host."""
    swap_in: list[BlockCopy] = []
    """Host to device."""
    copies_awaited: int = -1
    """All copies of plans up to this one are done: rank 0 has said so, the others make sure before they go on."""
    masks: list[TokenMask] = []
    """For sampling rows whose tokens are limited."""
    deferred: list[int] = []
    """Places of sampling rows whose masks depend on a token that is not known yet: they are computed with the
    others, and sampled when a later plan brings ``late_masks``. The step's result waits for that."""
    late_masks: LateMasks | None = None
    """Before anything else of this plan: sample the deferred rows of that step."""
    awaits_copies: bool = False
    """The result comes when all copies so far are done."""
    branches: list[Branch] = []
    """Before ``new_rows``."""
    tail_copies: list[TailCopy] = []
    """Before the step computes, in the order of all steps."""
    forks: list[Fork] = []
    """They sample after all other rows, in this order; each is one of ``new_rows``."""

    @property
    def num_batched_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(self.num_tokens)

    @property
    def sampled_positions(self) -> list[tuple[int, int]]:
        """Of each token that the step samples: its row, and its position there."""
        ends = [start + count for start, count in zip(self.starts, self.num_tokens, strict=True)]
        columns = zip(self.rows, ends, self.samples, strict=True)
        sampled = [(row, end) for row, end, is_last in columns if is_last]
        if self.forks:
            end_of = dict(zip(self.rows, ends, strict=True))
            sampled += [(fork.row, end_of[fork.source]) for fork in self.forks]
        return sampled


NONE_ALLOWED = -1
"""In place of a token: what the request forbids left none, or the logits were no finite numbers."""
NOT_FINITE = -2
"""In place of a token: the model's own logits were no finite numbers, before anything was forbidden."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the distribution before temperature and truncation."""

    sampled: float
    top_token_ids: list[int]
    top_logprobs: list[float]
    """Descending."""
    rank: int = 0
    """One more than the number of tokens that are likelier than the one that stands there; 0: not told."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 answers: one entry for each sampling row, in plan order, then for each fork."""

    step_id: int
    token_ids: list[int]
    """``NONE_ALLOWED`` or ``NOT_FINITE`` where there is none."""
    logprobs: list[TokenLogprobs | None] | None = None
    """None when no row asked for any."""
    elapsed_s: float = 0.0
    """From the start of the step's work on the rank to its sampled tokens."""
    pooled: list[bytes | None] | None = None
    """Vectors of rows that end with one, float32 little-endian; None when no row does."""
    prompt_logprobs: list[list[TokenLogprobs] | None] | None = None
    """Of sampling rows whose prompts are scored: their tokens from the second on; None when there is none."""
    copied: int = -1
    """All copies of plans up to this one are done."""
    num_copied_blocks: int = 0
    """Of the copies that ended since the last result and were timed, and how long they took."""
    copied_s: float = 0.0
    corrupt_blocks: list[int] = []
    """Device blocks whose copy in, now done, did not find what had been copied out."""


class Executor(Protocol):
    """Runs plans in the order launched, on one rank in process or on a group over the step channel."""

    def launch(self, plan: StepPlan) -> None:
        """Hand over a plan; return before it has run where the executor can."""
        ...

    def collect(self) -> StepResult:
        """Return the result of the oldest plan launched and not yet collected; block until it is there.

        Raises:
            RankLost: a rank died or broke the channel; no later call will succeed.
        """
        ...

    def ready(self) -> bool:
        """True if ``collect`` would not block."""
        ...

    def close(self) -> None:
        """Let ranks go. Safe to call twice."""
        ...


@runtime_checkable
class Waitable(Protocol):
    """An executor that one can wait for beside other things."""

    def fileno(self) -> int:
        """Readable as long as ``ready`` is true (an eventfd, say); owned by the executor."""
        ...
